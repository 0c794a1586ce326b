"""The page CDC without a browser: what it shows of pipelines, to whom, and how much it reads for that."""

from __future__ import annotations

import ast
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import tests.support.airflow_support  # noqa: F401 - before Airflow

# isort: split
from airflow import plugins_manager
from airflow.api_fastapi.core_api.datamodels.plugins import PluginResponse
from fastapi.testclient import TestClient

from airflow_cdc_provider import __version__
from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.slots import SlotState
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.run_errors import request_stop
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import write_heartbeat
from airflow_cdc_provider.engine.state.history import extended
from airflow_cdc_provider.engine.state.submission import Submission
from airflow_cdc_provider.plugins import cdc
from airflow_cdc_provider.plugins.api import STATIC, Pipelines, make_app
from airflow_cdc_provider.plugins.conditions import condition
from airflow_cdc_provider.plugins.ledgers import TableChunks
from airflow_cdc_provider.plugins.overview import describe, summarize, wants_poll
from airflow_cdc_provider.plugins.pipeline_files import find_pipelines, read_pipeline
from airflow_cdc_provider.plugins.reports import PipelineReport, Reports, read_report
from airflow_cdc_provider.plugins.slot_polls import SlotAnswer, SlotPolls
from airflow_cdc_provider.plugins.spark_ui import SparkJob, address_of, explain, page
from tests.conftest import Databases
from tests.support.page_reports import GONE, SLOT, THIS, beat, write_file
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

pytestmark = pytest.mark.airflow
# -- the plugin --------------------------------------------------------------------------------------


def test_airflow_takes_the_plugin() -> None:
    (info,) = [each for each in plugins_manager.get_plugin_info() if each["name"] == "airflow_cdc"]

    plugin = PluginResponse.model_validate(info)

    assert [(app.destination, app.category) for app in plugin.react_apps] == [("nav", "browse"), ("dag", None)]
    assert len({app.url_route for app in plugin.react_apps}) == 2
    for app in plugin.react_apps:
        for address in (app.bundle_url, app.icon, app.icon_dark_mode):
            assert address is not None
            assert (STATIC / address.rpartition("/")[2]).exists()
    assert [app.url_prefix for app in plugin.fastapi_apps] == ["/cdc"]


def test_the_plugin_is_cheap_for_processes_that_have_no_use_for_the_page() -> None:
    tree = ast.parse(Path(cdc.__file__).read_text(encoding="utf-8"))

    assert [node.module for node in tree.body if isinstance(node, ast.ImportFrom)] == [
        "__future__",
        "functools",
        "typing",
        "airflow.plugins_manager",
        "airflow_cdc_provider",
    ]


# -- files -------------------------------------------------------------------------------------------


def test_files_are_found_in_a_folder_or_by_a_glob_and_wrong_ones_say_why(tmp_path: Path) -> None:
    write_file(tmp_path, "shop")
    write_file(tmp_path, "zz_twin", pipeline="shop")
    (tmp_path / "broken.yml").write_text(
        "pipeline: broken\nsource: {dsn: 'postgresql://u:hunter2@h/d', tables: 1}\nsink: {}"
    )
    (tmp_path / "notes.txt").write_text("pipeline: no")

    files = {file.name: file for file in find_pipelines(str(tmp_path))}

    assert files.keys() == {"shop", "zz_twin", "broken"}
    assert files["shop"].pipeline is not None
    assert "have the same pipeline name" in files["zz_twin"].error.message  # type: ignore[union-attr]
    assert "source.tables" in files["broken"].error.message  # type: ignore[union-attr]
    assert "hunter2" not in str(summarize(files["broken"], PipelineReport(), None, 0.0))
    assert [file.name for file in find_pipelines(f"{tmp_path}/sh*.yaml")] == ["shop"]
    assert find_pipelines(f"{tmp_path}/nowhere") == []

    write_file(tmp_path, "shop", pipeline="store")
    assert "store" in {file.name for file in find_pipelines(str(tmp_path))}


# -- contents ------------------------------------------------------------------------------------------


def test_a_job_that_begins_and_one_that_is_lost_are_told_from_the_state(tmp_path: Path) -> None:
    pipeline = read_pipeline(write_file(tmp_path, "shop")).pipeline
    assert pipeline is not None
    state = State(pipeline.state)
    write_heartbeat(state, beat(owner=GONE))

    assert condition(report := read_report(pipeline)).state == "failed"
    assert report.error is not None
    assert report.error["kind"] == "JobLost"

    submission.write(state, replace(Submission.new("shop", "stream", ["stream"]), keeper=THIS))
    assert condition(read_report(pipeline)).state == "starting"  # so that it is not resumed


@pytest.mark.parametrize(
    ("slot", "mode", "said"),
    [
        (None, "initial", "no replication slot airflow_cdc_shop"),
        (None, "only", None),
        ({"wal_status": "lost"}, "initial", "has removed log"),
        ({"wal_status": "reserved"}, "initial", None),
    ],
)
def test_a_pipeline_whose_slot_is_gone_needs_attention(
    tmp_path: Path, slot: dict[str, str] | None, mode: str, said: str | None
) -> None:
    file = read_pipeline(write_file(tmp_path, "shop", snapshot={"mode": mode}))
    state = None if slot is None else SlotState("pgoutput", "shop", False, None, 0x100, 0x180, slot["wal_status"], 0)

    line = summarize(file, PipelineReport((beat(ended=True),)), SlotAnswer(time.time(), state), time.time())

    assert line["state"] == ("failed" if said else "idle")
    assert (line["error"] is not None) is (said is not None)
    if said:
        assert said in line["error"]["message"]
        assert "`airflow-cdc resnapshot --all`" in line["error"]["solution"]
        assert line["error"]["solution"].endswith("In Airflow, trigger the Dag `cdc_resnapshot` with Everything.")


@pytest.mark.parametrize(
    ("name", "content", "culprit"),
    [
        ("jobs/stream.json", {**asdict(beat()), "progress": {"slot": {"odd": 1}}}, "jobs/stream.json"),
        ("jobs/stream.json", {**asdict(beat()), "progress": {"chunks": 1}}, "jobs/stream.json"),
        ("jobs/stream.json", {**asdict(beat()), "progress": {"slot": 5}}, None),
        ("jobs/stream.json", [1, 2], None),
        ("ledger.json", {"epoch": 1, "chunks": 7}, None),
    ],
)
def test_an_odd_file_in_a_state_takes_down_no_other_pipeline(
    pipelines: Pipelines, tmp_path: Path, name: str, content: Any, culprit: str | None
) -> None:
    for pipeline in ("odd", "sound"):
        write_file(tmp_path, pipeline)
        write_heartbeat(State(str(tmp_path / "states" / pipeline)), beat())
    (tmp_path / "states" / "odd" / name).write_text(json.dumps(content))

    told = {line["name"]: line for line in pipelines.all(Anybody())}  # type: ignore[arg-type]

    assert told["sound"]["state"] == "live"
    described = pipelines.describe(read_pipeline(tmp_path / "odd.yaml"))
    if culprit is None:  # such a file counts as missing
        assert told["odd"]["state"] in ("live", "new")
    else:
        assert (told["odd"]["state"], described["state"]) == ("unreadable", "unreadable")
        assert f"states/odd/{culprit} has a structure" in told["odd"]["error"]["message"]


class Anybody:
    """A user who may see all pipelines."""

    def visible(self, name: str) -> bool:
        return True

    def own(self, name: str) -> None:
        return None


def test_a_state_of_which_the_page_cannot_know_the_place_is_told(tmp_path: Path) -> None:
    file = read_pipeline(write_file(tmp_path, "shop", state="${STATE_OF_WORKERS}/shop"))
    assert file.error is not None
    assert "STATE_OF_WORKERS" in file.error.message


def test_a_pipeline_as_a_line(tmp_path: Path) -> None:
    file = read_pipeline(write_file(tmp_path, "shop", stream={"max_retained_wal": "600 B"}))
    report = PipelineReport(
        (beat(applied_lsn="0/200", lag_bytes=0x100, lag_seconds=1.5, slot=SLOT, waiting="for a lock"),)
    )

    line = summarize(file, report, None, time.time())

    slot = line["slot"]
    assert (line["state"], line["lag_bytes"], line["lag_seconds"]) == ("live", 0x100, 1.5)
    assert (slot["acknowledged_bytes"], slot["applied_bytes"], slot["lag_bytes"]) == (0x80, 0x80, 0x100)
    assert (slot["level"], slot["budget_bytes"], slot["applied_lsn"]) == ("warning", 600, "0/200")
    assert line["waiting"] == "for a lock"


def test_a_ledger_is_divided_once_for_all_who_look(
    pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_pipeline(write_file(tmp_path, "shop"))
    state = State(str(tmp_path / "states" / "shop"))
    chunk = {"table": "public.t", "index": 0, "lower": None, "upper": None, "finished": False, "rows": 0}
    divided: list[str] = []
    of = TableChunks.of
    monkeypatch.setattr(TableChunks, "of", lambda table, chunks: divided.append(table) or of(table, chunks))

    def finished() -> int:
        return int(pipelines.describe(file)["tables"][0]["finished"])

    state.write("ledger.json", {"epoch": 1, "chunks": [chunk]})
    assert [finished() for _ in range(3)] == [0, 0, 0]
    assert divided == ["public.t"]
    write_heartbeat(state, beat("snapshot-0", finished_chunks=[["public.t", 0, 0]]))
    assert finished() == 1  # as jobs report it
    assert divided == ["public.t"]
    state.write("ledger.json", {"epoch": 2, "chunks": [chunk | {"finished": True}]})
    assert finished() == 1
    assert divided == ["public.t"] * 2


def test_two_hundred_pipelines_take_a_few_reads_each_and_none_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(200):
        write_file(tmp_path, f"p{i}")
    first = State(str(tmp_path / "states" / "p0"))
    write_heartbeat(first, beat(slot=SLOT))
    first.write("history/stream.json", {"epoch": 1, **extended(None, {"samples": [], "batches": [], "errors": []})})
    for i in range(1, 200):
        shutil.copytree(tmp_path / "states" / "p0", tmp_path / "states" / f"p{i}")
    reads: Counter[str] = Counter()
    read = State.read_as

    def counting(self: State, name: str, parse: Callable[[dict[str, Any]], Any]) -> Any:
        reads[name] += 1
        return read(self, name, parse)

    monkeypatch.setattr(State, "read_as", counting)
    files, reports = find_pipelines(str(tmp_path)), Reports()

    found = reports.of(files)
    assert reports.of(files) is found

    assert {condition(found[file.path]).state for file in files} == {"live"}
    assert reads == {"jobs/stream.json": 200, "error.json": 200, "history/stream.json": 200}


# -- Spark's web interface -----------------------------------------------------------------------------

BEGUN = replace(Submission.new("shop", "stream", ["stream"]), hosts=["driver"])
ENDED = replace(BEGUN, ended_at=1.0)
UI = "http://driver:4040"
HISTORY = "https://history/spark/"


@pytest.mark.parametrize(
    ("job", "live", "later"),
    [
        (SparkJob(BEGUN, None), "has not started yet", "has not started yet"),
        (SparkJob(BEGUN, beat()), "has not started yet", "has not started yet"),
        (SparkJob(BEGUN, replace(beat(), application="app-1", ui=UI)), UI, UI),
        (SparkJob(BEGUN, replace(beat(), application="app-1", ui="http://elsewhere:4040")), "not confirmed", None),
        (SparkJob(None, replace(beat(), application="app-1", ui=UI)), "reports that its UI is at", None),
        (SparkJob(None, replace(beat(), application="app-1")), "without a UI", f"{HISTORY}history/app-1/"),
        (SparkJob(None, replace(beat(), application="app-1", ui="javascript:alert(1)")), "without a UI", None),
        (
            SparkJob(None, replace(beat(owner=GONE), application="app-1", ui=UI)),
            "has ended",
            f"{HISTORY}history/app-1/",
        ),
        (SparkJob(BEGUN, replace(beat(ended=True), application="app-1", ui=UI)), "app-1 has ended", None),
        (SparkJob(replace(ENDED, application="app-1"), None), "app-1 has ended", f"{HISTORY}history/app-1/"),
        (SparkJob(None, None, "app-1"), "app-1 has ended", f"{HISTORY}history/app-1/"),
        (SparkJob(ENDED, None), "is unknown", "is unknown"),
        (SparkJob(None, None), "is unknown", "is unknown"),
    ],
)
def test_a_browser_is_sent_to_the_spark_of_a_job(job: SparkJob, live: str, later: str | None) -> None:
    """This works without a history server and with one."""
    for server, expected in (("", live), ("ftp://history", live), (HISTORY, later or f"{HISTORY}history/app-1/")):
        told = address_of(job, server) or " ".join(explain(job))
        assert told == expected if "//" in expected else expected in told


def test_the_page_in_the_place_of_sparks_runs_nothing() -> None:
    assert "<script>" not in page("<script>alert(1)</script>", "<script>")


# -- real servers ------------------------------------------------------------------------------------


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipelines:
    """Return the pipelines of a folder, as the API server sees them."""
    monkeypatch.setenv("AIRFLOW__AIRFLOW_CDC__PIPELINES", str(tmp_path))
    return Pipelines()


def test_who_is_nobody_gets_nothing() -> None:
    page = TestClient(make_app())
    requests = [
        ("GET", "/api/pipelines"),
        ("GET", "/api/pipelines/shop"),
        ("GET", "/api/pipelines/shop/tables/a.b"),
        ("GET", "/api/pipelines/shop/spark/1"),
        ("POST", "/api/pipelines/shop/stop"),
    ]

    assert [page.request(*request).status_code for request in requests] == [401] * 5
    assert [page.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3
    assert page.get(f"/static/{__version__}/main.js").headers["content-type"].startswith("text/javascript")


def test_a_real_stream_is_shown_and_after_its_end_its_server_is_asked(
    pipelines: Pipelines, tmp_path: Path, databases: Databases
) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], snapshot={"chunk_rows": 100})
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)", "INSERT INTO public.t SELECT generate_series(1, 300)"
    )

    def told() -> Any:
        return pipelines.describe(read_pipeline(pipeline.file))

    assert told()["state"] == "new"
    pipeline.provision()
    pipeline.copy(0, 1, 2)
    write_record_copy(pipeline.pipeline, State(pipeline.pipeline.state), pipeline.record)
    streaming = Streaming(pipeline)
    streaming.until(lambda: told()["state"] == "live" and told()["slot"] is not None, "the stream on the page")
    pipeline.source(
        "INSERT INTO public.t VALUES (301), (302), (303)",
        "UPDATE public.t SET body = 'x' WHERE id <= 2",
        "DELETE FROM public.t WHERE id = 3",
    )
    streaming.until(lambda: bool(told()["batches"]), "a batch on the page")
    streaming.until(lambda: told()["tables"][0]["total"] == [3, 2, 1], "the operations on the page")
    assert commands.verify(pipeline.pipeline)["equal"]

    shown = told()

    assert shown["slot"]["name"] == pipeline.pipeline.source.slot
    assert "/" in shown["slot"]["restart_lsn"]
    assert "/" in shown["batches"][0]["end_lsn"]
    (row,) = shown["tables"]
    assert [row[name] for name in ("table", "state", "chunks", "finished")] == ["public.t", "live", 3, 3]
    assert (row["per_minute"], row["rows"], row["verified"]["equal"]) == ([3, 2, 1], 302, True)
    assert row["delay"] is not None
    table = pipelines.describe_table(read_pipeline(pipeline.file), "public.t")
    assert table["shape"]["columns"] == [["id", "integer", True], ["body", "text", False]]
    assert (table["shape"]["key"], len(table["cells"]), table["targets"]) == (["id"], 3, ["postgres public.t"])
    assert request_stop(State(pipeline.pipeline.state), "alice") == ["stream"]
    streaming.join(SECONDS)
    assert (told()["state"], told()["by"], told()["tables"][0]["state"]) == ("stopped", "alice", "stopped")
    assert told()["stops"][0]["parts"] == ["stream"]
    # By then, the job's report about the slot is older than half a minute.
    later, report = time.time() + 60, read_report(pipeline.pipeline)
    assert wants_poll(report, later)
    polls = SlotPolls()
    assert await_condition(lambda: bool(polls.look([pipeline.file])), SECONDS)
    poll = polls.look([pipeline.file])[pipeline.file]
    polled = describe(read_pipeline(pipeline.file), report, poll, later)
    assert polled["slot"]["at"] == poll.at
    assert polled["slot"]["lag_bytes"] >= 0
    assert databases.pipeline_source not in json.dumps(polled)


def test_a_server_that_does_not_answer_is_said_and_not_waited_for(pipelines: Pipelines, tmp_path: Path) -> None:
    server = {"dsn": "postgresql://cdc:hunter2@127.0.0.1:1/shop"}
    file = read_pipeline(write_file(tmp_path, "shop", source=server | {"tables": ["public.*"]}, sink=server))
    write_heartbeat(State(str(tmp_path / "states" / "shop")), beat(ended=True))

    assert pipelines.describe(file)["slot"] is None
    assert await_condition(lambda: pipelines.describe(file)["slot"] is not None, SECONDS)

    assert pipelines.describe(file)["slot"]["error"]["kind"] == "ConnectionFailed"
    assert "hunter2" not in json.dumps(pipelines.describe(file))
