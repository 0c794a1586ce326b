"""The sink's record: restored from a backup, gone, in parts."""

from __future__ import annotations

import re
import shutil

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError, Fenced, ForeignTable, GateClosed
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.protocol.repairs.scene import LOST, ROWS, TABLE, Make, Mode, assert_healed, carry_out, content, refused
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


def copy_target(server: PostgresServer, pipeline: PipelineUnderTest, backup: str) -> None:
    """Make a backup of the target database."""
    execute(server.dsn(), f"CREATE DATABASE {backup} TEMPLATE {pipeline.name}")


def restore_target(server: PostgresServer, pipeline: PipelineUnderTest, backup: str) -> None:
    """Replace the target database with the backup."""
    drop_database(server, pipeline.name)
    execute(server.dsn(), f"ALTER DATABASE {backup} RENAME TO {pipeline.name}")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_target_that_is_restored_from_a_backup(
    make_pipeline: Make, target_server: PostgresServer, mode: Mode
) -> None:
    """The slot has acknowledged more than the backup holds, so that the log in between is gone."""
    pipeline = make_pipeline(mode)
    copy_target(target_server, pipeline, f"{pipeline.name}_backup")
    pipeline.source(*LOST)
    pipeline.apply()
    restore_target(target_server, pipeline, f"{pipeline.name}_backup")
    solution = refused(pipeline, GateClosed, "has been acknowledged up to")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_target_that_is_restored_and_still_in_reach_of_the_slot(
    make_pipeline: Make, target_server: PostgresServer, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that were committed but not acknowledged are streamed again, from the position in the backup's record."""
    pipeline = make_pipeline(mode)
    copy_target(target_server, pipeline, f"{pipeline.name}_backup")
    pipeline.source(*LOST)
    monkeypatch.setenv("AIRFLOW_CDC_FAILPOINT", "before-acknowledgement:error")
    with pytest.raises(CdcError, match="failpoint"):
        pipeline.apply()
    monkeypatch.delenv("AIRFLOW_CDC_FAILPOINT")
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE id = 100") == [(1,)]
    restore_target(target_server, pipeline, f"{pipeline.name}_backup")
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE id = 100") == [(0,)]
    assert_healed(pipeline)


FORGET = "DELETE FROM airflow_cdc.{} WHERE pipeline = current_database()"
LOSSES = {
    "the schema": ("DROP SCHEMA airflow_cdc CASCADE",),
    "the pipeline's part": tuple(FORGET.format(table) for table in ("chunks", "tables", "pipelines")),
    "the targets too": ("DROP SCHEMA airflow_cdc CASCADE", "DROP TABLE public.t"),
}


@pytest.mark.parametrize(
    ("mode", "loss"), [("mirror", "the schema"), ("changelog", "the pipeline's part"), ("mirror", "the targets too")]
)
def test_a_record_that_is_gone(make_pipeline: Make, mode: Mode, loss: str) -> None:
    """The state proves what belongs to the pipeline, and no earlier run can commit under the new record."""
    pipeline = make_pipeline(mode)
    sink, before = sink_of(pipeline.pipeline), pipeline.record
    pipeline.source(*LOST)
    pipeline.target(*LOSSES[loss])
    solution = refused(pipeline, GateClosed, "no commit record")
    carry_out(pipeline, solution)
    applied = pipeline.record.applied
    with pytest.raises(Fenced):
        sink.commit(before.epoch, applied, applied + 1, [])
    assert_healed(pipeline)
    assert pipeline.source_rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [
        (1,)
    ]


def test_a_record_that_is_gone_and_targets_that_are_not_as_they_were(make_pipeline: Make) -> None:
    """The definition under which the rows were written is unknown, and tables that only the file has are foreign."""
    pipeline = make_pipeline()
    pipeline.source(*LOST, "ALTER TABLE public.t ADD b int", "CREATE TABLE public.u (id int PRIMARY KEY)")
    pipeline.target("DROP SCHEMA airflow_cdc CASCADE")
    solution = refused(pipeline, GateClosed, "no commit record")
    before = content(pipeline)
    with pytest.raises(ForeignTable, match=r"is not defined like public\.t; its columns should be id int"):
        carry_out(pipeline, solution)
    pipeline.target("ALTER TABLE public.t ADD b int")
    pipeline.target("CREATE TABLE public.u (id int PRIMARY KEY)", "INSERT INTO public.u VALUES (1)")
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    with pytest.raises(ForeignTable, match=r"public\.u exists and has rows that pipeline .* did not write"):
        carry_out(pipeline, solution)
    assert [row[:2] for row in content(pipeline)] == before
    assert pipeline.target_rows("SELECT to_regclass('airflow_cdc.pipelines')") == [(None,)]
    pipeline.change(source={"tables": ["public.t"]})
    carry_out(pipeline, solution)
    assert_healed(pipeline)


FOREIGN = {
    "rows": ("INSERT INTO public.u VALUES (1)", r"public\.u exists and has rows"),
    "none": (
        "INSERT INTO airflow_cdc.tables VALUES ('other', 'public.u', 'public', 'u', '{}')",
        r"public\.u belongs to pipeline 'other'",
    ),
}


@pytest.mark.parametrize("record", ["whole", "lost"])
@pytest.mark.parametrize("has", FOREIGN)
def test_a_target_that_is_not_ours_is_refused_while_there_is_a_slot(make_pipeline: Make, record: str, has: str) -> None:
    """Only the file has that table. What the pipeline has created stays, so that it continues without the table."""
    pipeline, (statement, words) = make_pipeline(), FOREIGN[has]
    made = (
        "SELECT slot_name::text, restart_lsn::text FROM pg_replication_slots WHERE database = current_database()"
        " UNION ALL SELECT pubname, oid::text FROM pg_publication"
    )
    pipeline.source(*LOST, "CREATE TABLE public.u (id int PRIMARY KEY)")
    before = pipeline.source_rows(made)
    pipeline.target("CREATE TABLE public.u (id int PRIMARY KEY)", statement)
    if record == "lost":
        pipeline.target(FORGET.format("pipelines"))
    pipeline.change(source={"tables": ["public.t", "public.u"]})
    with pytest.raises(ForeignTable, match=words):
        provisioning.start_over(pipeline.pipeline, takeover=False)
    assert pipeline.source_rows(made) == before
    pipeline.change(source={"tables": ["public.t"]})
    if record == "lost":
        provisioning.start_over(pipeline.pipeline, takeover=False)
        pipeline.copy()
    assert_healed(pipeline)


def test_another_sink_is_not_taken_for_one_that_has_lost_its_record(
    make_pipeline: Make, target_server: PostgresServer
) -> None:
    pipeline = make_pipeline()
    other = f"other_{pipeline.name}"
    create_database(target_server, other)
    try:
        execute(target_server.dsn(other), TABLE, ROWS)
        pipeline.change(sink={"dsn": target_server.dsn(other)})
        with pytest.raises(GateClosed, match=r"no commit record .* has no copy"):
            provisioning.start_over(pipeline.pipeline, takeover=False)
        with pytest.raises(ForeignTable, match=r"public\.t exists and has rows"):
            pipeline.provision()
        assert query_rows(target_server.dsn(other), "SELECT count(*) FROM public.t WHERE body LIKE 'row %'") == [(20,)]
    finally:
        drop_database(target_server, other)


def test_a_pipeline_without_its_record_is_dropped(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.target("DROP SCHEMA airflow_cdc CASCADE")
    commands.drop(pipeline.pipeline)
    left = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert pipeline.source_rows(f"{left} UNION ALL SELECT pubname FROM pg_publication") == []


def test_a_record_and_a_state_that_are_gone(make_pipeline: Make) -> None:
    """Nothing proves their origin, so the pipeline neither continues nor adopts them: it starts over."""
    pipeline = make_pipeline()
    pipeline.source(*LOST)
    pipeline.target("DROP SCHEMA airflow_cdc CASCADE")
    shutil.rmtree(pipeline.state)
    with pytest.raises(GateClosed, match="no commit record") as missing:
        pipeline.apply()
    assert "airflow-cdc provision" in missing.value.solution
    with pytest.raises(GateClosed, match=r"no commit record .* has no copy"):
        carry_out(pipeline, missing.value.solution)
    with pytest.raises(ForeignTable, match=r"public\.t exists and has rows"):
        pipeline.provision()
    pipeline.target("TRUNCATE public.t")
    with pytest.raises(GateClosed, match="the sink has no record") as slot:
        pipeline.provision()
    drop = re.search(r"SELECT pg_drop_replication_slot\('\w+'\)", slot.value.solution)
    assert drop
    pipeline.source(drop[0])
    pipeline.provision()
    pipeline.copy()
    assert_healed(pipeline)


def test_a_record_that_is_not_whole(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.source(*LOST)
    pipeline.target("ALTER TABLE airflow_cdc.chunks RENAME TO mislaid")
    solution = refused(pipeline, GateClosed, r"lacks airflow_cdc\.chunks")
    assert "backup" in solution
    pipeline.target("ALTER TABLE airflow_cdc.mislaid RENAME TO chunks")
    assert_healed(pipeline)
