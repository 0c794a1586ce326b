"""The reports of a job while it works: its progress in the state, chunk by chunk, and its metrics for Prometheus."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.chunk_ranges import ChunkIndex, places, ranges
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.pipeline.settings import MetricsSettings
from airflow_cdc_provider.engine.runs import metrics, run
from airflow_cdc_provider.engine.runs.metrics import require_client, serving
from airflow_cdc_provider.engine.runs.record_copy import read_grid
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk
from airflow_cdc_provider.engine.spark import session
from airflow_cdc_provider.engine.state.chunk_progress import chunk_grid
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner
from airflow_cdc_provider.engine.state.history import read_history
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.scrape import scrape
from tests.support.streaming import Streaming

ANYWHERE = {"prometheus": "127.0.0.1:0"}
CHUNKS = 24


class _LocalSpark:
    """A session from the view of the snapshot job: a task runs in the thread that requests it."""

    applicationId, uiWebUrl = "local-1", None

    @property
    def sparkContext(self) -> _LocalSpark:
        return self

    def parallelize(self, tasks: Sequence[Any], slices: int) -> Any:
        def mapped(function: Callable[[Any], Any]) -> Any:
            return SimpleNamespace(collect=lambda: [function(task) for task in tasks])

        return SimpleNamespace(map=mapped)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    under_test = PipelineUnderTest(
        tmp_path, databases, ["public.a", "public.b"], metrics=ANYWHERE, snapshot={"chunk_rows": 50}
    )
    for table, rows in (("a", 50 * (CHUNKS - 1)), ("b", 50)):
        under_test.source(
            f"CREATE TABLE public.{table} (id int PRIMARY KEY, n int NOT NULL)",
            f"INSERT INTO public.{table} SELECT n, 0 FROM generate_series(1, {rows}) n",
        )
    yield under_test
    under_test.end_commands()


def test_a_snapshot_and_a_stream_report(pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state alone shows which chunks are running; a scrape shows what the stream has applied, by table."""
    monkeypatch.setattr(session, "spark_session", lambda *_: nullcontext(_LocalSpark()))
    monkeypatch.setattr(session, "reporting_jvm_end", lambda *_: nullcontext())
    monkeypatch.setattr(run, "_BEAT_SECONDS", 0.01)
    pipeline.provision()
    state = State(pipeline.pipeline.state)
    seen: list[dict[str, Any]] = []

    def look(command: str, progress: Mapping[str, Any]) -> None:
        a, b = read_grid(state)
        assert (a["chunks"], b["chunks"]) == (CHUNKS - 1, 1)
        assert not places(progress["running_chunks"]) & places(progress["finished_chunks"])
        assert (progress["eta_seconds"] is None) == (progress["finished"] == 0)
        seen.append(a)

    copied = commands.snapshot(pipeline.pipeline, report=look)
    assert (copied["chunks"], copied["finished"], copied["rows"]) == (CHUNKS, CHUNKS, 50 * CHUNKS)
    assert any(table["running_chunks"] for table in seen)
    assert any(0 < table["finished"] < CHUNKS - 1 for table in seen)
    assert [table["finished"] for table in seen] == sorted(table["finished"] for table in seen)
    whole = [
        {"table": f"public.{name}", "chunks": count, "finished": count, "rows": 50 * count,
         "finished_chunks": [[0, count - 1]], "running_chunks": []}
        for name, count in (("a", CHUNKS - 1), ("b", 1))
    ]  # fmt: skip
    assert read_grid(state) == whole == commands.status(pipeline.pipeline)["tables"]

    streaming = Streaming(pipeline)
    pipeline.source("UPDATE public.a SET n = 1 WHERE id <= 30", "DELETE FROM public.b WHERE id <= 4")
    marker = pipeline.marker()
    streaming.until(lambda: pipeline.record.applied >= marker, "the changes")
    part = streaming.run_
    assert part is not None
    assert part.look_at_slot() is not None
    streaming.until(lambda: part.progress.get("changes") == 34, "the progress")
    found = scrape(part.metrics_port)
    report = part.report()
    assert found["job_info", f"{part.epoch},stream"] == 1
    assert found["changes_total", "stream,public.a"] == 30
    assert found["changes_total", "stream,public.b"] == 4
    assert found["restarts_total", "stream"] == 0
    assert found["retained_wal_bytes", "stream"] == report["slot"]["retained_bytes"] > 0
    assert found["batch_seconds", "stream"] == report["batch_seconds"] > 0
    assert {"lag_bytes", "lag_seconds", "acknowledgement_seconds", "rows_per_second"} <= {name for name, _ in found}
    streaming.end()

    history = read_history(state)
    assert sum(batch["changes"] for batch in history["batches"]) == 34
    assert parse_lsn(history["batches"][-1]["end_lsn"]) <= pipeline.record.applied
    last = history["samples"][-1]
    assert parse_lsn(last["applied_lsn"]) >= marker
    assert (last["retained_bytes"] > 0, last["lag_bytes"] >= 0, last["lag_seconds"] >= 0) == (True, True, True)
    with pytest.raises(OSError, match="refused"):
        scrape(part.metrics_port)


def test_chunks_that_wait_for_their_commit_are_shown_as_running(
    pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are read while a slow sink commits the first."""
    monkeypatch.setattr(session, "spark_session", lambda *_: nullcontext(_LocalSpark()))
    monkeypatch.setattr(session, "reporting_jvm_end", lambda *_: nullcontext())
    pipeline.provision()
    all_shown, commit = Event(), PostgresSink.commit_chunks

    def held(sink: PostgresSink, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        assert all_shown.wait(SECONDS)
        return commit(sink, epoch, copied)

    def look(command: str, progress: Mapping[str, Any]) -> None:
        if not all_shown.is_set():
            assert progress["finished"] == 0
        if len(places(progress["running_chunks"])) == CHUNKS:
            all_shown.set()

    monkeypatch.setattr(PostgresSink, "commit_chunks", held)
    copied = commands.snapshot(pipeline.pipeline, report=look)
    assert (copied["finished"], copied["rows"]) == (CHUNKS, 50 * CHUNKS)


def test_an_address_in_use_ends_no_job_and_a_missing_package_is_told(
    pipeline: PipelineUnderTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pipeline.pipeline
    report = {"restarts": 2, "chunks": 3, "finished": 1, "rows": 5, "eta_seconds": None, "slot": None}
    with serving(asked, "snapshot-0", 7, lambda: report) as port:
        assert scrape(port) == {
            ("job_info", "7,snapshot-0"): 1, ("restarts_total", "snapshot-0"): 2, ("chunks", "snapshot-0"): 3,
            ("chunks_finished_total", "snapshot-0"): 1, ("rows_copied_total", "snapshot-0"): 5,
        }  # fmt: skip
        taken = replace(asked, metrics=MetricsSettings(("127.0.0.1", port or 0)))
        with caplog.at_level(logging.WARNING), serving(taken, "snapshot-1", 7, dict) as other:
            assert other is None
        assert str(port) in caplog.text
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="prometheus-client") as refused:
        require_client(asked)
    assert "airflow-cdc-provider[prometheus]" in refused.value.solution
    require_client(replace(asked, metrics=MetricsSettings()))
    with pytest.raises(ConfigError, match="prometheus-client"):
        pipeline.apply()


def test_the_metrics_are_those_of_the_documentation() -> None:
    """The report has everything: a stream and a snapshot at once."""
    gauges = dict.fromkeys(metrics._GAUGES, 1)
    view = {"view": "v", "built_percent": 50.0, "queued": 1, "behind": True, "anchors": 1, "seconds": 0.5}
    report = gauges | {"restarts": 0, "slot": {"retained_bytes": 1}, "tables": {"t": 1}, "finished": 1, "rows": 1}
    report["views"] = [view]
    collected = metrics._ProgressCollector("shop", "stream", 1, lambda: report).collect()
    served = {sample.name for family in collected for sample in family.samples}
    table = (
        (Path(__file__).parents[2] / "docs" / "production.md")
        .read_text(encoding="utf-8")
        .partition("| metric | meaning |")[2]
        .partition("\n\n")[0]
    )
    assert served == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_chunks_that_follow_each_other_are_told_by_their_ends() -> None:
    def beat(pid: int, **progress: Iterable[ChunkIndex]) -> Heartbeat:
        told = {name: ranges(places) for name, places in progress.items()}
        return Heartbeat(replace(Owner.this(), pid=pid), "snapshot-0", 1, 0.0, False, told)

    planned = {("t", index): (index < 2, 10) for index in range(8)} | {("u", 0): (False, 0)}
    living = beat(
        Owner.this().pid, finished_chunks=[("t", 2), ("t", 6), ("gone", 0)], running_chunks=[("t", 4), ("t", 6)]
    )
    dead = beat(1 << 30, finished_chunks=[("t", 7)], running_chunks=[("u", 0)])
    assert chunk_grid(planned, [living, dead]) == [
        {"table": "t", "chunks": 8, "finished": 5, "rows": 80, "finished_chunks": [[0, 2], [6, 7]],
         "running_chunks": [[4, 4]]},
        {"table": "u", "chunks": 1, "finished": 0, "rows": 0, "finished_chunks": [], "running_chunks": []},
    ]  # fmt: skip
