"""A commit record that is lost, wholly or in part, and recreated: what the state proves, and what it does not.

Tests in ``tests/protocol/repairs`` cover that a lost record is refused, and repaired as the messages say.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import repair
from airflow_cdc_provider.engine.core.errors import CdcError, Fenced, ForeignTable, GateClosed, SecondWriter
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.record_copy import read_record_copy
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.runs.single_writer import require_epoch
from airflow_cdc_provider.engine.sources.postgres.provision import provision_lock, provisioning
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, drop_database
from tests.protocol.repairs.scene import LOST, ROWS, TABLE, assert_healed
from tests.support.databases import execute
from tests.support.engine_parts import copy_chunk_of
from tests.support.pipelines import PipelineUnderTest

FORGET = "DELETE FROM airflow_cdc.pipelines"


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline of ``public.t`` whose snapshot is done."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"])
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    under_test.apply()
    return under_test


def test_what_is_left_of_a_record_does_not_count(pipeline: PipelineUnderTest) -> None:
    """Its chunks were read for another slot: counted as finished, they would hide changes made in between."""
    pipeline.target(FORGET)
    pipeline.source(*LOST)
    provisioning.start_over(pipeline.pipeline, takeover=False)
    assert len(pipeline.record.unfinished) == len(pipeline.record.chunks) == 1
    pipeline.copy()
    assert_healed(pipeline)


def test_what_is_left_of_a_record_vouches_for_no_rows(pipeline: PipelineUnderTest) -> None:
    """If the state is lost too, targets with rows are not accepted as the pipeline's; emptied, they are refilled."""
    pipeline.target(FORGET)
    pipeline.source(*LOST, f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    (pipeline.state / "ledger.json").unlink()
    with pytest.raises(ForeignTable, match=r"public\.t exists and has rows"):
        pipeline.provision()
    pipeline.target("TRUNCATE public.t")
    pipeline.provision()
    pipeline.copy()
    assert_healed(pipeline)


def test_a_sink_is_known_by_what_it_is(pipeline: PipelineUnderTest, target_server: PostgresServer) -> None:
    """Its address does not matter: another database can replace it, and the same one can have another address."""
    before = pipeline.target_rows("SELECT * FROM public.t ORDER BY 1")
    execute(
        target_server.dsn(),
        f"CREATE DATABASE {pipeline.name}_other TEMPLATE {pipeline.name}",
        f"ALTER DATABASE {pipeline.name} RENAME TO {pipeline.name}_moved",
        f"ALTER DATABASE {pipeline.name}_other RENAME TO {pipeline.name}",
    )
    pipeline.target(FORGET)
    pipeline.source(*LOST)
    with pytest.raises(GateClosed, match=r"no commit record .* has no copy"):
        provisioning.start_over(pipeline.pipeline, takeover=False)
    assert pipeline.target_rows("SELECT * FROM public.t ORDER BY 1") == before
    try:
        pipeline.change(sink={"dsn": target_server.dsn(f"{pipeline.name}_moved")})
        assert read_record_copy(pipeline.pipeline, State(pipeline.pipeline.state)) is not None
    finally:
        drop_database(target_server, f"{pipeline.name}_moved")


def test_a_target_that_is_another_pipelines_by_now(pipeline: PipelineUnderTest) -> None:
    """The state records what the pipeline has created, not what has happened to it since."""
    to_other = (f"UPDATE airflow_cdc.{name} SET pipeline = 'other'" for name in ("pipelines", "tables", "chunks"))
    pipeline.target(*to_other)
    with pytest.raises(ForeignTable, match=r"public\.t belongs to pipeline 'other'") as refused:
        provisioning.start_over(pipeline.pipeline, takeover=False)
    assert "airflow-cdc drop" in refused.value.solution
    assert pipeline.target_rows("SELECT pipeline, source_table FROM airflow_cdc.tables") == [("other", "public.t")]


def snapshot(pipeline: Pipeline, *, epoch: int | None = None, takeover: bool = False, **_: Any) -> dict[str, Any]:
    """Run the command without Spark."""
    with run_part(pipeline, "snapshot-0", epoch, takeover):
        copied = [copy_chunk_of(pipeline, chunk, epoch) for chunk in existing_record(pipeline).unfinished]
    for result in copied:
        if isinstance(result, CdcError):
            raise result
    return {"rows": copied}


def test_a_job_that_lives_is_overtaken_for_good(pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is recreated and filled under one epoch, which neither the job nor any other run has."""
    monkeypatch.setattr(repair, "snapshot", snapshot)
    before, state = pipeline.record, State(pipeline.pipeline.state)
    elsewhere = dataclasses.replace(Owner.this(), host="elsewhere/1")
    write_heartbeat(state, Heartbeat(elsewhere, "stream", before.epoch, 4_000_000_000.0, False, {}))
    pipeline.target(FORGET)
    pipeline.source(*LOST)
    with pytest.raises(SecondWriter, match="elsewhere"):
        commands.resnapshot(pipeline.pipeline, everything=True)
    assert commands.resnapshot(pipeline.pipeline, everything=True, takeover=True)["rows"] == [20]
    written = pipeline.target_rows("SELECT DISTINCT epoch FROM airflow_cdc.chunks")
    assert written == [(pipeline.record.epoch,)]
    assert pipeline.record.epoch > before.epoch
    assert_healed(pipeline)


@pytest.mark.parametrize("record", ["lost", "whole"])
@pytest.mark.parametrize("takeover", [False, True])
def test_two_that_start_over_at_once(
    pipeline: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch, record: str, takeover: bool
) -> None:
    """The second starts when the first is about to remove the slot, which would by then be the second one's."""
    monkeypatch.setattr(provision_lock, "_WAIT_SECONDS", 0.2)
    if record == "lost":
        pipeline.target(FORGET)
    pipeline.source(*LOST)
    remove_slot, begun = provisioning.remove_slot, list[int]()

    def remove(*arguments: Any) -> None:
        if not begun:
            begun.append(1)
            second()
        remove_slot(*arguments)

    def second() -> None:
        if takeover:
            provisioning.start_over(pipeline.pipeline, takeover=True)
            return
        with pytest.raises(SecondWriter, match=r"another command is making .* \(session \d+ of") as refused:
            provisioning.start_over(pipeline.pipeline, takeover=False)
        assert "--takeover" in refused.value.solution

    monkeypatch.setattr(provisioning, "remove_slot", remove)
    if takeover:
        with pytest.raises(DRIVER_ERRORS):
            provisioning.start_over(pipeline.pipeline, takeover=False)
    else:
        provisioning.start_over(pipeline.pipeline, takeover=False)
    pipeline.copy()
    assert_healed(pipeline)


def test_a_run_is_told_what_its_epoch_met(pipeline: PipelineUnderTest) -> None:
    """A later epoch is another run's; an earlier one is that of a record older than this run."""
    sink, record = sink_of(pipeline.pipeline), pipeline.record
    for ahead, words in ((1, "another run has taken over"), (-1, "restored from a backup")):
        pipeline.target(f"UPDATE airflow_cdc.pipelines SET epoch = {record.epoch + ahead}")
        with pytest.raises(Fenced, match=words), sink.fenced(record.epoch):
            pass
        with pytest.raises(Fenced, match=words):
            require_epoch(pipeline.record, record.epoch)
