"""Problems at the source without an event in the log, and edits of a pipeline's file: how they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import LOG_START
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.state.files import State
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
PARTITIONED = """
CREATE TABLE public.p (id int PRIMARY KEY, body text) PARTITION BY RANGE (id);
CREATE TABLE public.p1 PARTITION OF public.p FOR VALUES FROM (0) TO (100);
CREATE TABLE public.p2 PARTITION OF public.p FOR VALUES FROM (100) TO (200);
INSERT INTO public.p SELECT i * 10, 'row ' || i FROM generate_series(1, 19) i
"""


def running(databases: Databases, directory: Path, table: str, *statements: str, **sections: Any) -> PipelineUnderTest:
    """Return a pipeline of one table, whose snapshot is done and whose stream has been applied."""
    pipeline = PipelineUnderTest(directory, databases, [table], **sections)
    pipeline.source(*statements)
    pipeline.provision()
    pipeline.copy(table=table)
    pipeline.apply()
    return pipeline


def start_over(pipeline: PipelineUnderTest) -> None:
    """Run ``resnapshot --all``, and copy its chunks in this process."""
    provisioning.start_over(pipeline.pipeline, takeover=False)
    pipeline.copy_tables()
    pipeline.apply()


def test_partitions_are_one_table_in_the_order_of_the_log(databases: Databases, tmp_path: Path) -> None:
    """A row moves to another partition and back, and a key is reused across them."""
    pipeline = running(databases, tmp_path, "public.p", PARTITIONED)
    pipeline.source(
        "UPDATE public.p SET id = 150 + 5 WHERE id = 10",
        "UPDATE public.p SET id = 10, body = 'back' WHERE id = 155",
        "BEGIN; DELETE FROM public.p WHERE id = 20; UPDATE public.p SET id = 20 WHERE id = 120; COMMIT",
        "UPDATE public.p SET body = 'new' WHERE id = 20",
    )
    pipeline.apply()
    pipeline.assert_equal("public.p")


@pytest.mark.parametrize("command", [commands.provision, commands.start_over, commands.drop])
def test_a_record_that_another_kind_of_source_has_made_is_refused(
    databases: Databases, tmp_path: Path, command: Callable[[Pipeline], object]
) -> None:
    """This holds even if the state contains nothing about it."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(TABLE)
    sink = sink_of(pipeline.pipeline)
    sink.prepare([], [], {"source": "kafka", "mode": "mirror"}, LOG_START)
    with pytest.raises(ConfigError, match="has been provisioned with 'kafka'"):
        command(pipeline.pipeline)
    assert sink.record() is not None
    assert "'kafka'" in commands.status(pipeline.pipeline)["attention"]["message"]


def test_truncating_one_partition_leaves_the_others(databases: Databases, tmp_path: Path) -> None:
    pipeline = running(databases, tmp_path, "public.p", PARTITIONED)
    pipeline.source("TRUNCATE public.p1", "INSERT INTO public.p VALUES (7, 'after')")
    pipeline.apply()
    pipeline.assert_equal("public.p")
    assert len(pipeline.target_rows("SELECT 1 FROM public.p")) == 11


def test_tables_added_to_a_publication_keep_their_columns_and_condition(databases: Databases, tmp_path: Path) -> None:
    rule = {"table": "public.u", "columns": ["id", "kept"], "where": "id > 5"}
    pipeline = running(
        databases, tmp_path, "public.t", TABLE, "CREATE TABLE public.u (id int PRIMARY KEY, kept text, left_out text)"
    )
    pipeline.change(source={"tables": ["public.t", rule]})
    pipeline.provision()
    pipeline.copy(table="public.u")
    pipeline.source("INSERT INTO public.u SELECT i, 'k', 'secret' FROM generate_series(1, 10) i")
    pipeline.apply()
    assert pipeline.target_rows("SELECT * FROM public.u ORDER BY id") == [(i, "k") for i in range(6, 11)]


def test_edits_that_would_break_what_is_written_are_refused(databases: Databases, tmp_path: Path) -> None:
    pipeline = running(databases, tmp_path, "public.t", TABLE)
    for change, words in [({"mode": "changelog"}, "sink.mode"), ({"schema": "other"}, "sink.schema")]:
        original = pipeline.document["sink"]
        pipeline.change(sink=change)
        with pytest.raises(ConfigError, match=words):
            pipeline.provision()
        pipeline.document["sink"] = original
        pipeline.change()
    pipeline.change(source={"tables": ["public.u"]})
    pipeline.source("CREATE TABLE public.u (id int PRIMARY KEY)")
    with pytest.raises(ConfigError, match=r"no longer covers public\.t"):
        pipeline.provision()


def test_a_changed_mode_is_named_in_place_of_what_hinders_the_other(databases: Databases, tmp_path: Path) -> None:
    pipeline = running(databases, tmp_path, "public.t", 'CREATE TABLE public.t (id int PRIMARY KEY, "_op" text)')
    pipeline.change(sink={"mode": "changelog"})
    (found,) = [finding for finding in preflight(pipeline.pipeline) if not finding.ok]
    assert found.check == "mode"
    assert "'changelog', but the pipeline has been provisioned as 'mirror'" in found.message


def test_a_slot_of_others_survives_drop(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(TABLE)
    slot = pipeline.pipeline.source.slot
    with psycopg.connect(databases.source, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        commands.drop(pipeline.pipeline)
        assert connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [slot]).fetchall()


def test_a_publication_of_others_survives_repair_and_drop(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    name = pipeline.pipeline.source.publication
    pipeline.source(TABLE, "INSERT INTO public.t VALUES (1, 'a')")
    with psycopg.connect(databases.source, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE PUBLICATION {} FOR TABLE public.t").format(sql.Identifier(name)))
        oid = connection.execute("SELECT oid FROM pg_publication WHERE pubname = %s", [name]).fetchone()
        pipeline.provision()
        pipeline.copy()
        start_over(pipeline)
        pipeline.assert_equal()
        commands.drop(pipeline.pipeline)
        assert connection.execute("SELECT oid FROM pg_publication WHERE pubname = %s", [name]).fetchone() == oid
        assert not connection.execute(
            "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [pipeline.pipeline.source.slot]
        ).fetchall()


def test_a_request_that_cannot_be_done_is_refused_before_it_is_left(databases: Databases, tmp_path: Path) -> None:
    pipeline = running(databases, tmp_path, "public.t", TABLE)
    for where in ["nonsense", "id = ", "id = 1; DROP TABLE public.t"]:
        with pytest.raises(ConfigError, match="--where"):
            commands.resnapshot(pipeline.pipeline, tables=["public.t"], where=where)
    assert State(pipeline.pipeline.state).names("requests") == []
    pipeline.source("INSERT INTO public.t VALUES (1, 'a')")
    pipeline.apply()
    pipeline.target("UPDATE public.t SET body = 'damaged'")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id > 0 -- all of them")
    pipeline.assert_equal()
