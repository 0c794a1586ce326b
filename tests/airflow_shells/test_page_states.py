"""The states of pipelines and tables on the page CDC, and the grid of chunks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tests.support.airflow_support  # noqa: F401 - before Airflow

# isort: split

from airflow_cdc_provider.engine.state.stops import StopRequest
from airflow_cdc_provider.plugins.conditions import LIVE_SECONDS, Condition, condition
from airflow_cdc_provider.plugins.dags import CdcDag
from airflow_cdc_provider.plugins.ledgers import CELLS, Ledger
from airflow_cdc_provider.plugins.overview import describe
from airflow_cdc_provider.plugins.pipeline_files import read_pipeline
from airflow_cdc_provider.plugins.reports import PipelineReport
from tests.support.page_reports import ERROR, GONE, THIS, beat, write_file

pytestmark = pytest.mark.airflow
ENDED_BEATS = (beat(ended=True),)
STOPPED = PipelineReport(ENDED_BEATS, stop=StopRequest(1.0, "alice", ["stream"], [THIS]))
DAG, PAUSED_DAG, SCHEDULED_DAG = CdcDag("d", False), CdcDag("d", True, 9.0), CdcDag("d", False, 9.0)


@pytest.mark.parametrize(
    ("report", "dag", "expected"),
    [
        (PipelineReport(), PAUSED_DAG, Condition("new")),
        (PipelineReport((beat(),)), PAUSED_DAG, Condition("live")),
        (PipelineReport((beat(lag_seconds=LIVE_SECONDS + 1),)), DAG, Condition("catching up")),
        (PipelineReport((beat("snapshot-0"), beat("stream", GONE))), DAG, Condition("copying")),
        (PipelineReport((beat("resnapshot"), beat("stream", GONE))), DAG, Condition("reading again")),
        (PipelineReport((beat(restart={"error": ERROR}),)), DAG, Condition("restarting")),
        (PipelineReport(ENDED_BEATS), None, Condition("idle")),
        (PipelineReport(ENDED_BEATS), SCHEDULED_DAG, Condition("idle", None, 9.0)),
        (STOPPED, DAG, Condition("stopped", "alice")),
        (STOPPED, SCHEDULED_DAG, Condition("idle", "alice", 9.0)),
        (STOPPED, PAUSED_DAG, Condition("paused", "alice")),
        (PipelineReport(ENDED_BEATS, error=ERROR), PAUSED_DAG, Condition("failed")),
        (PipelineReport(error=ERROR), DAG, Condition("failed")),
        (PipelineReport(ENDED_BEATS, error=ERROR, starting=True), DAG, Condition("starting")),
        (PipelineReport((beat(),), error=ERROR), DAG, Condition("live")),
    ],
)
def test_the_state_of_a_pipeline_in_a_word(report: PipelineReport, dag: CdcDag | None, expected: Condition) -> None:
    assert condition(report, None, dag) == expected


def test_chunks_stand_in_a_bounded_grid_with_those_that_jobs_have_told_of(tmp_path: Path) -> None:
    file = read_pipeline(write_file(tmp_path, "shop"))
    chunks = [
        {"table": table, "index": i, "lower": None, "upper": [str(i)], "finished": i < 2, "rows": 7}
        for table, number in (("public.large", 1000), ("public.small", 4))
        for i in range(number)
    ]
    job = beat(
        "snapshot-0",
        chunks=4,
        finished=1,
        rows=7,
        rows_per_second=3,
        eta_seconds=9,
        finished_chunks=[["public.small", 2, 2]],
        running_chunks=[["public.small", 3, 3]],
    )

    told = describe(file, PipelineReport((job,), ledger=Ledger.of({"epoch": 1, "chunks": chunks})), None, time.time())

    large, small = told["tables"]
    counts = [large[name] for name in ("total", "per_minute", "changed_at", "verified")]
    assert counts == [[0, 0, 0], None, None, None]
    assert [(table["state"], table["chunks"], table["finished"]) for table in (large, small)] == [
        ("copying", 1000, 2),
        ("copying", 4, 3),
    ]
    ledger = Ledger.of({"epoch": 1, "chunks": chunks})
    assert len(ledger.cells("public.large", [job])["cells"]) <= CELLS
    cells = ledger.cells("public.small", [job])["cells"]
    assert [(cell["done"], cell["running"]) for cell in cells] == [(1, False)] * 3 + [(0, True)]
    assert (told["snapshot"]["finished"], told["snapshot"]["eta"]) == (1, 9)


@pytest.mark.parametrize(
    ("report", "states"),
    [
        ({"beats": (beat("snapshot-0", running_chunks=[["a.b", 0, 0]]),)}, ["copying", "waiting", "copied"]),
        ({"beats": (beat(),)}, ["live", "live", "live"]),
        ({"beats": (beat(),), "rereads": frozenset({"a.bc"})}, ["live", "reading again", "live"]),
        ({"beats": (beat(ended=True),), "error": ERROR}, ["failed", "failed", "failed"]),
        ({"beats": ()}, ["new", "new", "new"]),
    ],
)
def test_the_state_of_a_table(tmp_path: Path, report: dict[str, Any], states: list[str]) -> None:
    """The third has no chunks; an error is the cause of the tables that it names, and of no other ones."""
    file = read_pipeline(write_file(tmp_path, "shop"))
    chunks = [{"table": label, "index": 0, "finished": False, "rows": 0} for label in ("a.b", "a.bc")]
    chunks = [chunk | {"lower": None, "upper": None} for chunk in chunks]
    sinks = [{"type": "postgres", "targets": {"a.bc": ["x", "bc"], "a.x": ["x", "x"]}}]
    shapes = {label: {"columns": [], "key": []} for label in ("a.b", "a.bc", "a.x")}
    ledger = Ledger.of({"epoch": 1, "chunks": chunks, "sinks": sinks, "tables": shapes})
    if "error" in report:
        report["error"] = report["error"] | {"message": "the column a.b.c is dropped"}

    told = describe(file, PipelineReport(ledger=ledger, **report), None, time.time())

    assert [table["table"] for table in told["tables"]] == ["a.b", "a.bc", "a.x"]
    assert [table["state"] for table in told["tables"]] == states
    assert [bool(table["cause"]) for table in told["tables"]] == ["error" in report, False, False]
