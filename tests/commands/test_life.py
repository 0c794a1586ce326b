"""The life of a pipeline by its commands, and the shape of ``--json``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.spark.session import spark_session
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.history import read_history
from local_servers.process import find_free_port
from tests.commands.command_line import CommandLine, assert_says_little, command_line, footprint, pipeline
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.scrape import scrape

__all__ = ["command_line", "pipeline"]

LSN_KEYS = {"applied_lsn", "restart_lsn", "confirmed_flush_lsn"}
RESULT = {"applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds", "caught_up"}


def shape(value: Any, key: str = "") -> None:
    """Return the shape of an object; LSNs are texts in every command."""
    if isinstance(value, dict):
        for name, part in value.items():
            shape(part, name)
    elif isinstance(value, list):
        for part in value:
            shape(part)
    elif key in LSN_KEYS and value is not None:
        parse_lsn(value)


@pytest.mark.spark
def test_the_life_of_a_pipeline(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    """Each command runs once, and returns the objects that programs rely on.

    Those that use Spark run in this process, where they share its JVM.
    """
    found = command_line.json("preflight")
    assert set(found) == {"findings"}
    assert all({"check", "ok", "warning", "message"} <= set(finding) for finding in found["findings"])
    assert all(finding["ok"] for finding in found["findings"])

    new = command_line.json("status")
    assert (new["state"], new["epoch"], new["applied_lsn"], new["slot"], new["tables"]) == ("new", None, None, None, [])

    provisioned = command_line.json("provision")
    assert provisioned["tables"] == ["public.t"]
    assert provisioned["chunks"] == 2
    again = command_line.json("provision")
    assert again["epoch"] > provisioned["epoch"]
    assert again == {**again, "chunks": 2, "applied_lsn": provisioned["applied_lsn"]}

    with spark_session(pipeline.pipeline.spark_start, "life"):
        copied = command_line.json("snapshot")
        assert (copied["chunks"], copied["finished"], copied["rows"]) == (2, 2, 100)
        assert command_line.json("snapshot")["rows"] == 0

        pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 10")
        end = pipeline.marker()
        streamed = command_line.json("stream", "--until", f"lsn:{format_lsn(end)}")
    assert streamed["caught_up"] is True
    assert parse_lsn(streamed["applied_lsn"]) >= end
    assert (streamed["changes"], streamed["tables"]) == (10, {"public.t": 10})
    assert (streamed["lag_bytes"] >= 0, streamed["lag_seconds"] >= 0) == (True, True)
    assert pipeline.confirmed() >= end

    status = pipeline.json("status")  # as a process
    assert set(status) >= {
        "pipeline",
        "state",
        "epoch",
        "consistent",
        "applied_lsn",
        "lag_bytes",
        "lag_seconds",
        "slot",
        "tables",
        "last_error",
    }
    assert set(status["slot"]) >= {"restart_lsn", "confirmed_flush_lsn", "retained_bytes", "wal_status", "active"}
    assert (status["pipeline"], status["state"], status["consistent"]) == (pipeline.name, "stopped", True)
    assert (status["last_error"], status["slot"]["active"]) == (None, False)
    assert status["tables"] == [
        {
            "table": "public.t",
            "chunks": 2,
            "finished": 2,
            "rows": 100,
            "finished_chunks": [[0, 1]],
            "running_chunks": [],
        }
    ]

    verified = command_line.json("verify")
    assert verified["equal"] is True
    (table,) = verified["tables"]
    assert (table["table"], table["source_rows"], table["target_rows"]) == ("public.t", 100, 100)
    assert (table["equal"], table["differences"]) == (True, [])
    for result in (provisioned, copied, streamed, status, verified):
        shape(result)
    assert command_line.json("stop") == {"asked": []}

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (3, 70)", "DELETE FROM public.t WHERE id = 5")
    damaged = command_line.json("verify", code=4)
    differences = {(d["kind"], d["key"]["id"]) for d in damaged["tables"][0]["differences"]}
    assert differences == {("different", "3"), ("different", "70"), ("missing", "5")}
    told = pipeline.run("verify", code=4).stdout
    assert '{"id": "70"}' in told
    part = command_line.json("resnapshot", "--table", "public.t", "--where", "id < 50")
    assert part == {"requested": None, "rows": 49, "tables": {"public.t": 49}}
    differences = [d["key"]["id"] for d in command_line.json("verify", code=4)["tables"][0]["differences"]]
    assert differences == ["70"]
    assert command_line.run("resnapshot", "--table", "public.t") == "100 rows read again\n"
    assert command_line.json("verify")["equal"] is True

    unknown = command_line.json("resnapshot", "--table", "public.u", code=2)
    assert "public.u" in unknown["error"]["message"]

    dropped = command_line.json("drop", "--yes")
    assert dropped == {"dropped": pipeline.name, "left": []}
    after = footprint(pipeline)
    assert (after["publications"], after["slots"], after["state"]) == ([], [], False)
    assert sink_of(pipeline.pipeline).record() is None
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(100,)]
    assert command_line.json("drop", "--yes") == dropped


@contextmanager
def terminating(pipeline: PipelineUnderTest, end: int) -> Iterator[None]:
    """Send this process SIGTERM during the block, once the stream that it runs has applied everything up to ``end``."""
    over = Event()

    def terminate() -> None:
        try:
            assert await_condition(lambda: pipeline.record.applied >= end, SECONDS), "the changes did not come"
            assert not over.is_set(), "the stream ended by itself"
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a signal that comes too late must not end the tests
    try:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(terminate)
            try:
                yield
            finally:
                over.set()
            sent.result()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.spark
def test_a_stream_and_how_it_ends(pipeline: PipelineUnderTest, command_line: CommandLine) -> None:
    """``stop`` and SIGTERM end a stream after its unit; until then it accepts requests, and is the only writer."""
    port = find_free_port()
    pipeline.change(metrics={"prometheus": f"127.0.0.1:{port}"})
    pipeline.provision()
    pipeline.copy()
    stream = pipeline.start("stream", "--json")
    pipeline.source("INSERT INTO public.t VALUES (1000, 'streamed')")
    pipeline.await_applied(stream)
    stream.until(lambda: scrape(port).get(("changes_total", "stream,public.t")) == 1, "the change among the metrics")
    assert {"lag_bytes", "lag_seconds", "retained_wal_bytes", "batch_seconds"} <= {name for name, _ in scrape(port)}
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 1000") == [("streamed",)]

    status = command_line.json("status")
    assert status["state"] == "streaming"
    assert status["slot"]["active"] is True
    refused = command_line.json("stream", code=3)
    assert refused["error"]["kind"] == "SecondWriter"
    assert str(stream.process.pid) in refused["error"]["message"]

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (7, 60)")
    requested = command_line.json("resnapshot", "--table", "public.t", "--where", "id = 7")
    assert requested["rows"] is None
    assert requested["requested"] is not None
    repaired = "SELECT id, body FROM public.t WHERE id IN (7, 60) ORDER BY id"
    stream.until(lambda: pipeline.target_rows(repaired)[0] == (7, "row 7"), "the repair of a row")
    assert pipeline.target_rows(repaired)[1] == (60, "damaged")
    told = command_line.run("resnapshot", "--table", "public.t")
    assert told == "The running stream has been asked to read the tables again.\n"
    stream.until(lambda: pipeline.target_rows(repaired)[1] == (60, "row 60"), "the repair of the table")

    pipeline.source("UPDATE public.t SET body = 'last' WHERE id = 1000")
    pipeline.await_applied(stream)
    assert command_line.json("stop") == {"asked": ["stream"]}
    ended = stream.wait()
    assert ended.code == 0, ended.stderr
    assert set(ended.json) == RESULT
    assert_says_little(ended)
    pipeline.assert_equal()
    # Workers learn of the end from the JVM.
    assert await_condition(lambda: not stream.processes(), 30), stream.processes()

    # The request to stop applied to that run, not to the next, which is in this process.
    pipeline.source("DELETE FROM public.t WHERE id = 1000")
    with terminating(pipeline, pipeline.marker()):
        assert set(command_line.json("stream")) == RESULT
    pipeline.assert_equal()
    assert command_line.json("status")["state"] == "stopped"
    history = read_history(State(pipeline.pipeline.state))  # of both runs
    assert sum(batch["changes"] for batch in history["batches"]) == 3
    assert [parse_lsn(sample["applied_lsn"]) for sample in history["samples"]][-1] >= parse_lsn(
        history["batches"][-1]["end_lsn"]
    )
    assert history["errors"] == []


@pytest.mark.spark
@pytest.mark.thorough
def test_runs_and_a_transaction_larger_than_a_batch(pipeline: PipelineUnderTest) -> None:
    """The second run streams 20 MiB of one transaction in batches of 1 MiB, and re-reads no chunk."""
    pipeline.change(stream={"max_batch_bytes": "1MiB"})
    first = pipeline.json("run")
    assert first["snapshot"]["rows"] == 100
    assert first["stream"]["caught_up"] is True
    chunks = pipeline.finished_chunks()
    pipeline.source(
        "UPDATE public.t SET body = 'before' WHERE id = 1",
        "INSERT INTO public.t SELECT n, repeat(md5(n::text), 32) FROM generate_series(1001, 21000) n",
        "UPDATE public.t SET body = 'after' WHERE id = 1",
    )
    second = pipeline.json("run")
    assert (second["snapshot"]["rows"], second["stream"]["caught_up"]) == (0, True)
    assert second["stream"]["changes"] == 20_002
    assert pipeline.finished_chunks() == chunks
    pipeline.assert_verified()
    pipeline.assert_equal(order="id")
