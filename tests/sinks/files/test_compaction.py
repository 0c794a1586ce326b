"""Compaction of a files sink: the same rows in fewer files, whatever happens meanwhile and wherever it ends."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError, Failpoint, GateClosed
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sinks.files.compaction import Compacted, Compaction
from airflow_cdc_provider.engine.sinks.files.data_file import DataFile
from airflow_cdc_provider.engine.sinks.files.data_writer import note_of
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake import log
from airflow_cdc_provider.engine.sinks.lake.log import SPAN
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change
from tests.support.files_sink import (
    AT,
    BODY,
    CHUNKS,
    DAY,
    ID,
    SOURCE,
    STORES,
    TARGET,
    change,
    chunk,
    column,
    data_files,
    effect,
    events,
    paths,
    provisioned,
    table,
    told,
    unit,
)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.sinks.files.test_compaction"])


@pytest.fixture(params=[*STORES[:-1], pytest.param("hdfs", marks=[pytest.mark.slow, pytest.mark.thorough])])
def sink(request: pytest.FixtureRequest) -> Iterator[FilesSink]:
    with provisioned(request.param, request) as found:
        yield found


def compaction(made: FilesSink, target_bytes: int = 1 << 20, retention: float = 3600.0, later: float = 0) -> Compaction:
    return Compaction(made, target_bytes, retention, time.time() + later)


def run(each: Compaction) -> Compacted:
    head = each.sink.head()
    assert head is not None
    return each.run(head)


def group(made: FilesSink) -> list[DataFile]:
    head = made.head()
    assert head is not None
    (found,) = compaction(made)._groups(head.contents)
    return found


def fill(made: FilesSink, epoch: int, count: int = 5, start: int = 50) -> None:
    for lsn in range(start, start + count):
        assert unit(made, epoch, lsn, lsn + 1, effect(change("i", lsn + 1, str(lsn), f"row {lsn}", None)))


def test_the_same_rows_stand_in_fewer_files(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    before, old = events(sink), paths(sink)
    assert run(compaction(sink)) == Compacted(files=5, made=1, rows=5)
    assert events(sink) == before
    (file,) = told(sink)["tables"]["public.t"]["files"]
    assert (file["rows"], file["first"], file["last"]) == (5, "0/33", "0/37")
    assert len(paths(sink)) == 1
    assert len(data_files(sink)) == 6, "readers may be at the old files"
    assert run(compaction(sink)) == Compacted()
    assert run(compaction(sink, later=4000)) == Compacted(removed=5)
    assert [sink.root.location(name) for name in data_files(sink)] == paths(sink)
    assert not set(old) & set(paths(sink))
    assert events(sink) == before
    head = sink.head()
    assert head is not None
    assert "old" not in head.contents


def test_dates_and_large_files_stay_by_themselves(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    for n in range(6):
        unit(sink, epoch, 50 + n, 51 + n, effect(change("i", 51 + n, str(n), None, None, ts=DAY * (1 + n // 2))))
    assert run(compaction(sink)) == Compacted(files=6, made=3, rows=6)
    assert [file["date"] for file in told(sink)["tables"]["public.t"]["files"]] == [
        "1970-01-02",
        "1970-01-03",
        "1970-01-04",
    ]
    size = max(file["size"] for file in told(sink)["tables"]["public.t"]["files"])
    fill(sink, epoch, 3, start=56)
    assert run(compaction(sink, target_bytes=2 * size)).files >= 2
    assert run(compaction(sink, target_bytes=10)) == Compacted()


def test_columns_that_came_later_are_null_in_rows_of_before(tmp_path: Path) -> None:
    made = FilesSink(Storage(str(tmp_path)), "shop", "changelog")
    made.prepare([TARGET], CHUNKS, SOURCE, 50)
    epoch = made.take_epoch("me")
    fill(made, epoch, 2)
    after = Target(table(ID, BODY, AT, column("more", "integer", 4)), "public", "t")
    made.redefine(epoch, TARGET, after)
    unit(made, epoch, 52, 60, effect(change("i", 60, "9", None, None, "7")))
    run(compaction(made))
    (path,) = paths(made)
    assert pq.read_table(path).column("more").to_pylist() == [None, None, 7]
    assert [event["more"] for event in events(made, after)] == [None, None, "7"]


def test_units_go_on_meanwhile(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    chosen = group(sink)
    written = compaction(sink)._write(chosen)
    fill(sink, epoch, 2, start=55)
    sink.take_epoch("another run")
    before = events(sink)
    assert compaction(sink)._commit(chosen, written)
    assert events(sink) == before
    assert len(before) == 7


def test_of_two_compactions_of_the_same_files_one_counts(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    before, chosen = events(sink), group(sink)
    one, other = (compaction(sink)._write(chosen) for _ in range(2))
    assert compaction(sink)._commit(chosen, one)
    assert not compaction(sink)._commit(chosen, other)
    assert events(sink) == before
    assert sink.root.size(other.path) is None


def test_one_that_has_slept_for_too_long_does_not_count(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    before = paths(sink)
    assert run(compaction(sink, retention=0.0)).made == 0
    assert paths(sink) == before


@pytest.mark.parametrize("place", ["before-compaction", "before-entry", "after-entry", "after-compaction"])
def test_wherever_it_breaks_off_the_rows_stay(
    sink: FilesSink,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    before = events(sink)
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        run(compaction(sink))
    monkeypatch.delenv(VARIABLE)
    assert events(sink) == before
    run(compaction(sink))
    assert events(sink) == before
    assert len(paths(sink)) == 1
    run(compaction(sink, later=4000))
    assert [sink.root.location(name) for name in data_files(sink)] == paths(sink), "orphans are gone"
    assert events(sink) == before


def test_files_of_two_formats_stay_by_themselves_and_the_second_is_refused(request: pytest.FixtureRequest) -> None:
    """One process uses an edited pipeline file, and others have read the file before."""
    with provisioned("json", request) as made:
        epoch = made.take_epoch("me")
        fill(made, epoch, 3)
        edited = replace(made, format="parquet")
        fill(edited, epoch, 3, start=53)
        before = events(made)
        assert [event["id"] for event in before] == [str(lsn) for lsn in range(50, 56)]
        assert events(edited) == before
        assert run(compaction(edited)) == Compacted(files=6, made=2, rows=6)
        assert events(made) == events(edited) == before
        for refused in (made, edited):
            with pytest.raises(ConfigError, match=r"sink\.format"):
                refused.check_targets([TARGET])
            with pytest.raises(ConfigError, match=r"sink\.format"):
                refused.take_epoch("next")


def others_go_on(made: FilesSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halt the next writer between its entry and the check of it, until that entry and earlier ones are pruned."""

    def standing_still(place: str) -> None:
        if place == "after-entry":
            monkeypatch.undo()
            for n in range(2 * SPAN + 10):
                made.append_without_epoch("an entry", lambda contents, n=n: Commit(Change({"others": {"n": n}})))  # type: ignore[misc]

    monkeypatch.setattr(log, "failpoint", standing_still)


def test_who_stands_still_while_others_go_on_from_its_entry_keeps_the_files_that_it_names(
    sink: FilesSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    before, chosen = events(sink), group(sink)
    made = compaction(sink)._write(chosen)
    others_go_on(sink, monkeypatch)
    assert compaction(sink)._commit(chosen, made)
    assert events(sink) == before
    others_go_on(sink, monkeypatch)
    assert unit(sink, epoch, 55, 56, effect(change("i", 56, "55", None, None)))
    assert [event["id"] for event in events(sink)] == ["50", "51", "52", "53", "54", "55"]
    assert chunk(sink, epoch, CHUNKS[0], ("1", "a", None)) == 1
    assert set(paths(sink)) <= {sink.root.location(name) for name in data_files(sink)}


def test_sweeping_leaves_files_to_readers_that_a_compaction_has_replaced(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    fill(sink, epoch)
    named = data_files(sink)
    notes = sink._staging("units", epoch)
    notes.replace(note_of(named[0]), named[0].encode())  # this remains if a run dies after its commit
    run(compaction(sink))
    sink.sweep(sink.take_epoch("next"))
    assert not notes.files()
    assert set(named) <= set(data_files(sink))


def _units(url: str, epoch: int) -> None:
    fill(FilesSink(Storage(url), "shop", "changelog"), epoch, 60)


@pytest.mark.lengthy
def test_a_process_that_commits_and_one_that_compacts_lose_nothing(tmp_path: Path) -> None:
    made = FilesSink(Storage(str(tmp_path)), "shop", "changelog")
    made.prepare([TARGET], CHUNKS, SOURCE, 50)
    process = processes.Process(target=_units, args=(str(tmp_path), made.take_epoch("me")))
    process.start()
    done = 0
    while process.is_alive():
        done += run(compaction(made)).made
    process.join()
    assert process.exitcode == 0
    run(compaction(made))
    assert done > 0
    assert [event["id"] for event in events(made)] == [str(lsn) for lsn in range(50, 110)]
    assert json.loads((tmp_path / "_manifest" / "shop.json").read_text())["applied"] == "0/6E"
    (path,) = paths(made)
    assert pq.read_metadata(path).num_rows == 60


def pipeline_file(sink_section: dict[str, Any], path: Path) -> Pipeline:
    file = path / "pipeline.yaml"
    document = {
        "pipeline": "shop",
        "source": {"dsn": "postgresql://cdc@db/shop", "tables": ["public.t"]},
        "sink": sink_section,
        "state": f"file://{path}/state",
    }
    file.write_text(json.dumps(document))
    return Pipeline.load(file)


def test_a_pipeline_is_compacted_by_its_file(tmp_path: Path) -> None:
    pipeline = pipeline_file({"type": "files", "path": str(tmp_path / "lake")}, tmp_path)
    with pytest.raises(GateClosed):
        commands.maintain(pipeline)
    made = sink_of(pipeline)
    assert isinstance(made, FilesSink)
    made.prepare([TARGET], CHUNKS, SOURCE, 50)
    fill(made, made.take_epoch("me"))
    done = {"files": 5, "made": 1, "rows": 5, "removed": 0}
    assert commands.maintain(pipeline) == {"sinks": [{"sink": str(tmp_path / "lake"), "done": [done]}]}
    assert commands.maintain(pipeline_file({"dsn": "postgresql://cdc@dw/dw"}, tmp_path)) == {"sinks": []}
