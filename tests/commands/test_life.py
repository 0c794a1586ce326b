"""The life of a pipeline by its commands, and the shape of ``--json``."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.history import read_history
from local_servers.process import find_free_port
from tests.commands.command_line import footprint, pipeline
from tests.support.pipelines import PipelineUnderTest
from tests.support.scrape import scrape

__all__ = ["pipeline"]

LSN_KEYS = {"applied_lsn", "restart_lsn", "confirmed_flush_lsn"}


def shape(value: Any, key: str = "") -> None:
    """LSNs are texts, whatever the command."""
    if isinstance(value, dict):
        for name, part in value.items():
            shape(part, name)
    elif isinstance(value, list):
        for part in value:
            shape(part)
    elif key in LSN_KEYS and value is not None:
        parse_lsn(value)


@pytest.mark.spark
def test_the_life_of_a_pipeline(pipeline: PipelineUnderTest) -> None:
    """Every command once, with the objects that programs rely on."""
    found = pipeline.json("preflight")
    assert set(found) == {"findings"}
    assert all({"check", "ok", "warning", "message"} <= set(finding) for finding in found["findings"])
    assert all(finding["ok"] for finding in found["findings"])

    new = pipeline.json("status")
    assert (new["state"], new["epoch"], new["applied_lsn"], new["slot"], new["tables"]) == ("new", None, None, None, [])

    provisioned = pipeline.json("provision")
    assert provisioned["tables"] == ["public.t"]
    assert provisioned["chunks"] == 2
    again = pipeline.json("provision")
    assert again["epoch"] > provisioned["epoch"]
    assert again == {**again, "chunks": 2, "applied_lsn": provisioned["applied_lsn"]}

    copied = pipeline.json("snapshot")
    assert (copied["chunks"], copied["finished"], copied["rows"]) == (2, 2, 100)
    assert pipeline.json("snapshot")["rows"] == 0

    pipeline.source("UPDATE public.t SET body = 'changed' WHERE id <= 10")
    end = pipeline.marker()
    streamed = pipeline.json("stream", "--until", f"lsn:{format_lsn(end)}")
    assert streamed["caught_up"] is True
    assert parse_lsn(streamed["applied_lsn"]) >= end
    assert (streamed["changes"], streamed["tables"]) == (10, {"public.t": 10})
    assert (streamed["lag_bytes"] >= 0, streamed["lag_seconds"] >= 0) == (True, True)
    assert pipeline.confirmed() >= end

    status = pipeline.json("status")
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

    verified = pipeline.json("verify")
    assert verified["equal"] is True
    (table,) = verified["tables"]
    assert (table["table"], table["source_rows"], table["target_rows"]) == ("public.t", 100, 100)
    assert (table["equal"], table["differences"]) == (True, [])
    for result in (provisioned, copied, streamed, status, verified):
        shape(result)
    assert pipeline.json("stop") == {"asked": []}

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (3, 70)", "DELETE FROM public.t WHERE id = 5")
    damaged = pipeline.json("verify", code=4)
    differences = {(d["kind"], d["key"]["id"]) for d in damaged["tables"][0]["differences"]}
    assert differences == {("different", "3"), ("different", "70"), ("missing", "5")}
    told = pipeline.run("verify", code=4).stdout
    assert '{"id": "70"}' in told
    part = pipeline.json("resnapshot", "--table", "public.t", "--where", "id < 50")
    assert part == {"requested": None, "rows": 49, "tables": {"public.t": 49}}
    differences = [d["key"]["id"] for d in pipeline.json("verify", code=4)["tables"][0]["differences"]]
    assert differences == ["70"]
    assert pipeline.json("resnapshot", "--table", "public.t")["tables"] == {"public.t": 100}
    assert pipeline.json("verify")["equal"] is True

    unknown = pipeline.json("resnapshot", "--table", "public.u", code=2)
    assert "public.u" in unknown["error"]["message"]

    dropped = pipeline.json("drop", "--yes")
    assert dropped == {"dropped": pipeline.name, "left": []}
    after = footprint(pipeline)
    assert (after["publications"], after["slots"], after["state"]) == ([], [], False)
    assert sink_of(pipeline.pipeline).record() is None
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(100,)]
    assert pipeline.json("drop", "--yes") == dropped


@pytest.mark.spark
def test_a_stream_and_how_it_ends(pipeline: PipelineUnderTest) -> None:
    """``stop`` and SIGTERM end a stream after its unit; in between it takes requests, and is the only writer."""
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

    status = pipeline.json("status")
    assert status["state"] == "streaming"
    assert status["slot"]["active"] is True
    refused = pipeline.json("stream", code=3)
    assert refused["error"]["kind"] == "SecondWriter"
    assert str(stream.process.pid) in refused["error"]["message"]

    pipeline.target("UPDATE public.t SET body = 'damaged' WHERE id IN (7, 60)")
    requested = pipeline.json("resnapshot", "--table", "public.t", "--where", "id = 7")
    assert requested["rows"] is None
    assert requested["requested"] is not None
    repaired = "SELECT id, body FROM public.t WHERE id IN (7, 60) ORDER BY id"
    stream.until(lambda: pipeline.target_rows(repaired)[0] == (7, "row 7"), "the repair of a row")
    assert pipeline.target_rows(repaired)[1] == (60, "damaged")
    pipeline.json("resnapshot", "--table", "public.t")
    stream.until(lambda: pipeline.target_rows(repaired)[1] == (60, "row 60"), "the repair of the table")

    pipeline.source("UPDATE public.t SET body = 'last' WHERE id = 1000")
    pipeline.await_applied(stream)
    assert pipeline.json("stop") == {"asked": ["stream"]}
    ended = stream.wait()
    assert ended.code == 0, ended.stderr
    assert set(ended.json) == {"applied_lsn", "changes", "tables", "lag_bytes", "lag_seconds", "caught_up"}
    pipeline.assert_equal()

    # The request to stop was for that run, not for the next.
    stream = pipeline.start("stream", "--json")
    pipeline.source("DELETE FROM public.t WHERE id = 1000")
    pipeline.await_applied(stream)
    assert stream.running
    stream.terminate()
    ended = stream.wait()
    assert ended.code == 0, ended.stderr
    pipeline.assert_equal()
    assert pipeline.json("status")["state"] == "stopped"
    assert await_condition(lambda: not stream.processes(), 30), (
        stream.processes()
    )  # workers hear of the end from the JVM
    history = read_history(State(pipeline.pipeline.state))  # of both runs
    assert sum(batch["changes"] for batch in history["batches"]) == 3
    assert [parse_lsn(sample["applied_lsn"]) for sample in history["samples"]][-1] >= parse_lsn(
        history["batches"][-1]["end_lsn"]
    )
    assert history["errors"] == []


@pytest.mark.spark
@pytest.mark.thorough
def test_runs_and_a_transaction_larger_than_a_batch(pipeline: PipelineUnderTest) -> None:
    """The second run streams 20 MiB of one transaction in batches of 1 MiB, and reads no chunk again."""
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
