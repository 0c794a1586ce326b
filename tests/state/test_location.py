"""The state location: its owner, its readers, and the effects of a damaged file in it."""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, StateDamaged, StateUnwritable
from airflow_cdc_provider.engine.core.section_values import PIPELINE_NAME
from airflow_cdc_provider.engine.runs.record_copy import read_grid
from airflow_cdc_provider.engine.runs.run_errors import last_error, record_error, request_stop
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.announcement import announced, announcements
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, read_heartbeats, write_heartbeat
from airflow_cdc_provider.engine.state.history import History, read_history
from airflow_cdc_provider.engine.state.location import clear, refuse_others, require_own, take
from airflow_cdc_provider.engine.state.requests import outcome, standing, waiting
from airflow_cdc_provider.engine.state.stops import note_stop
from airflow_cdc_provider.engine.state.verification import write_verification
from tests.conftest import Databases
from tests.support.hdfs import HdfsCluster
from tests.support.pipelines import PipelineUnderTest

BEAT = Heartbeat(
    Owner.this(),
    "stream",
    1,
    time.time(),
    False,
    {
        "changes": 5,
        "applied_lsn": "0/1",
        "slot": {"retained_bytes": 5},
        "tables": {"public.t": 5},
        "rows_per_second": 1.5,
        "finished_chunks": [["public.t", 0, 1]],
        "restart": {"attempt": 1, "of": 2, "next_attempt_at": 1.0, "error": {"message": "m", "solution": "s"}},
    },
)
LEDGER = {
    "identity": {"source": "postgres", "slot": "s"},
    "sinks": [{"sink": {"place": "x"}, "mode": "mirror", "targets": {"public.t": ["public", "t"]}}],
    "epoch": 1,
    "chunks": [{"table": "public.t", "index": 0, "lower": None, "upper": None, "finished": True, "rows": 5}],
}
JOB = submission.Submission("1", "p", "stream", ["stream"], 1.0, keeper=Owner.this())
ERROR = ConnectionFailed("the server", "Start it.")


def fill(state: State) -> list[str]:
    """Write a file of each kind, and return their names."""
    write_heartbeat(state, BEAT)
    submission.write(state, JOB)
    submission.ask_to_stop(state, JOB.id, submission.Asker.AIRFLOW)
    state.write("ledger.json", LEDGER)
    state.write("stop.json", {"owners": [asdict(Owner.this())]})
    note_stop(state, "alice", ["stream"], [Owner.this()])
    verified = {"equal": True, "target_rows": 1, "difference_count": 0, "unsettled": 0}
    write_verification(state, [{"table": "a.b", **verified}])
    history = History(state, "stream", 1)
    history.sample(BEAT.progress)
    history.batch(1, 0.5, 100)
    history.error(ERROR)
    history.write()
    record_error(state, "run", ERROR)
    rule = {"pattern": "public.t", "columns": None, "where": None}
    state.write("requests/r.json", {"tables": ["public.t"], "where": None, "rules": [rule], "waiting": "for it"})
    state.write("outcomes/o.json", {"rows": {"public.t": 5}, "ended_at": 5.0})
    take(state, "shop")
    return [
        f"{folder}/{name}"
        for folder in ("jobs", "history", "requests", "outcomes", "submissions", "stops")
        for name in os.listdir(Path(state.url.removeprefix("file://")) / folder)
    ] + ["ledger.json", "stop.json", "stopped.json", "verified.json", "error.json", "pipeline.json"]


def read_everything(state: State) -> None:
    """Read everything that ``stop``, ``status``, the page and a watcher of jobs read."""
    read_heartbeats(state)
    read_history(state)
    read_grid(state)
    last_error(state)
    submission.awaited(state)
    submission.unended(state)
    submission.askers(state, JOB.id)
    outcome(state, "o")
    waiting(state, "r")
    standing(state, "r")
    refuse_others(state, "shop")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths in a JSON value."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from ((key, *path) for path in paths(each))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a JSON value with another one at a path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_odd_file_keeps_others_from_being_read_or_a_job_from_being_stopped(place: Path, data: st.DataObject) -> None:
    """Any JSON may be at any place of any file; ``stop`` reaches the job whose own files are valid."""
    root = place / uuid.uuid4().hex
    state = State(f"file://{root}")
    name = data.draw(st.sampled_from(fill(state)))
    found = json.loads((root / name).read_text())
    path = data.draw(st.sampled_from(list(paths(found))))
    new = data.draw(JSON)
    assume(
        name != "pipeline.json" or not (isinstance(new, str) and PIPELINE_NAME.fullmatch(new))
    )  # correct, but another pipeline's
    (root / name).write_text(json.dumps(put(found, path, new)))

    read_everything(state)
    asked = request_stop(state, "alice")

    if not name.startswith(("jobs/", "submissions/", "stops/")):
        assert asked == ["stream"]
    if not name.startswith("jobs/"):
        assert [beat.owner for beat in read_heartbeats(state)] == [Owner.this()]


@pytest.mark.parametrize("content", [b"", b'{"owners": [', b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'"text"'])
def test_a_truncated_file_is_named_and_left_out(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    state = State(f"file://{tmp_path}/state")
    names = fill(state)
    for name in names:
        (tmp_path / "state" / name).write_bytes(content)
    read_everything(state)
    assert request_stop(state, "alice") == []
    warned = "\n".join(caplog.messages)
    assert f"Delete that file: `rm -r '{tmp_path}/state/jobs/stream.json'`." in warned
    with pytest.raises(StateDamaged, match=r"jobs/stream\.json has contents that") as damaged:
        state.read("jobs/stream.json")
    assert "rm -r" in damaged.value.solution
    # Rewritten files are complete again.
    write_heartbeat(state, BEAT)
    History(state, "stream", 1).write()
    record_error(state, "stream", ERROR)
    take(state, "shop")
    assert [beat.part for beat in read_heartbeats(state)] == ["stream"]
    assert last_error(state) is not None


def test_status_and_stop_with_a_state_in_which_all_is_odd(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    fill(State(pipeline.pipeline.state))
    for file in pipeline.state.rglob("*.json"):
        file.write_text('{"at": [], "owners": {}, "epoch": "x", "rows": 0}')
    assert commands.status(pipeline.pipeline)["state"] == "new" or commands.status(pipeline.pipeline)["tables"]
    assert commands.stop(pipeline.pipeline) == {"asked": []}
    with pytest.raises(StateDamaged, match=r"ledger\.json") as damaged:
        pipeline.provision()
    assert f"rm -r '{pipeline.state}/ledger.json'" in damaged.value.solution
    (pipeline.state / "ledger.json").unlink()
    pipeline.provision()
    assert read_grid(State(pipeline.pipeline.state))


# -- its owner -------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory", pytest.param("hdfs", marks=pytest.mark.slow)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> State:
    """Return a location of each kind."""
    if request.param == "hdfs":
        cluster: HdfsCluster = request.getfixturevalue("hdfs")
        return State(f"{cluster.url}/{uuid.uuid4().hex}")
    return State(f"file://{tmp_path}/state" if request.param == "file" else f"memory://{uuid.uuid4().hex}/state")


OURS = {"submissions/1.json", "engine/0123456789ab.jar", "engine/0123456789ab.py", "checkpoint/7/ab/offsets/0"}
THEIRS = {"notes.txt", "jobs/notes.txt", "backup/jobs/stream.json", "engine/report.csv", "checkpoint/mine", "x.json"}


def every(state: State) -> set[str]:
    """Return the files of a location, relative to it."""
    root = str(state._root)
    state._fs.invalidate_cache()
    return {str(path).removeprefix(root).lstrip("/") for path in state._fs.find(root)}


def test_only_what_pipelines_write_is_removed(anywhere: State, caplog: pytest.LogCaptureFixture) -> None:
    state = anywhere
    take(state, "shop")
    for name in (*OURS, "ledger.json", "jobs/stream.json", "history/stream.json"):
        state.put(name, b"{}")
    require_own(state, "shop")
    clear(state)
    assert every(state) == set()
    assert not state._fs.exists(state._root)
    clear(state)

    for name in (*OURS, *THEIRS, "error.json"):
        state.put(name, b"{}")
    clear(state)
    assert every(state) == THEIRS
    assert all(name.partition("/")[0] in caplog.text for name in THEIRS)


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_a_location_that_holds_what_is_not_ours_is_refused(tmp_path: Path, name: str) -> None:
    state = State(f"file://{tmp_path}")
    (tmp_path / "lost+found").mkdir()
    require_own(state, "shop")
    state.put(name, b"{}")
    with pytest.raises(ConfigError, match="has files that no pipeline writes"):
        require_own(state, "shop")


def test_a_location_of_another_pipeline_is_refused_and_stays(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    before = every(State(pipeline.pipeline.state))
    other = replace(pipeline.pipeline, name="other")
    found = {finding.check: finding for finding in preflight(other)}["state"]
    assert f"is that of pipeline '{pipeline.name}', not of 'other'" in found.message
    for step in (commands.provision, commands.drop, commands.stream, commands.start_over):
        with pytest.raises(ConfigError, match=f"is that of pipeline '{pipeline.name}', not of 'other'"):
            step(other)
    assert every(State(pipeline.pipeline.state)) == before

    above = replace(pipeline.pipeline, name="other", state=f"file://{tmp_path}")
    assert (
        "has files that no pipeline writes" in {finding.check: finding for finding in preflight(above)}["state"].message
    )


def test_drop_leaves_what_is_not_the_pipelines(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY)")
    pipeline.provision()
    (pipeline.state / "thesis").mkdir()
    (pipeline.state / "thesis" / "final.tex").touch()
    assert cli.main(["drop", "--pipeline", str(pipeline.file), "--yes"]) == 0
    assert every(State(pipeline.pipeline.state)) == {"thesis/final.tex"}


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_is_refused_before_it_begins_leaves_the_location_as_it_was(tmp_path: Path, made: bool) -> None:
    state = State(f"file://{tmp_path}/state")
    if made:
        (tmp_path / "state").mkdir()
    with announced(state, "stream"):
        assert not state.exists()
        assert [beat.part for beat in announcements(state)] == ["stream"]
    assert (tmp_path / "state").exists() == made
    assert not made or list((tmp_path / "state").iterdir()) == []


# -- its readers -----------------------------------------------------------------------------------


def modes(root: Path) -> set[str]:
    """Return the permissions of a folder's files and folders."""
    return {stat.filemode(path.lstat().st_mode) for path in (root, *root.rglob("*"))}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_nobody_else_reads_the_state(tmp_path: Path, open_umask: None) -> None:
    state = State(f"file://{tmp_path}/a/state")
    fill(state)
    state.new_checkpoint(1)
    assert modes(tmp_path / "a" / "state") == {"drwx------", "-rw-------"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o777


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (0o755, {"drwxr-xr-x", "drwx------", "-rw-------"}),
        (0o777, {"drwxrwxrwx", "drwx------", "-rw-------"}),
        (0o750, {"drwxr-x---", "-rw-r-----"}),
        (0o2770, {"drwxrws---", "-rw-rw----"}),
    ],
)
def test_a_folder_that_was_made_for_a_group_stays_open_to_it(tmp_path: Path, made: int, found: set[str]) -> None:
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(made)
    state = State(f"file://{root}")
    fill(state)
    state.new_checkpoint(1)
    assert modes(root) == found


@pytest.mark.slow
def test_nobody_else_reads_the_state_in_hdfs(hdfs: HdfsCluster) -> None:
    state = State(f"{hdfs.url}/{uuid.uuid4().hex}/state")
    state.write("error.json", {})
    assert state._fs.info(state._root)["permission"] == "700"


def test_a_location_that_nothing_can_reach_is_told_as_that() -> None:
    with pytest.raises(StateUnwritable, match="cannot be used"):
        State("nothing-knows-this://bucket/state")
