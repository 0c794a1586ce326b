"""Breaks of slot, publication or targets while the pipeline is stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    CdcError,
    Fenced,
    GateClosed,
    MissingPrivilege,
    ServerNotReady,
)
from airflow_cdc_provider.engine.runs.run import run_part
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.reading import reread
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, ServerMaker, create_database, drop_database
from tests.protocol.repairs.scene import DROP_SLOT, LOST, ROWS, TABLE, Make, Mode, assert_healed, carry_out, refused
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Break:
    """A break of a pipeline that is stopped.

    :param source: statements on the source, after the writes.
    :param first: statements on the source, before the writes.
    :param target: statements on the target.
    :param words: pattern of the refusal.
    :param solution: pattern of its solution, in addition to the repair.
    :param kind: error with which every command refuses.
    """

    words: str
    source: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    solution: str = "resnapshot"
    kind: type[CdcError] = GateClosed


CREATE_SLOT = "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
LAST_LSN = "FFFFFFFF/FFFFFF00"
BREAKS = {
    "slot dropped": Break("no longer exists", (DROP_SLOT,)),
    "slot made again after writes": Break("has been acknowledged up to", (DROP_SLOT, CREATE_SLOT)),
    "slot made again before writes": Break("has been acknowledged up to", first=(DROP_SLOT, CREATE_SLOT)),
    "slot advanced": Break(
        "has been acknowledged up to", ("SELECT pg_replication_slot_advance('{slot}', pg_current_wal_flush_lsn())",)
    ),
    "slot read by somebody": Break(
        "has been acknowledged up to",
        (
            "SELECT count(*) FROM pg_logical_slot_get_binary_changes('{slot}', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', '{publication}')",
        ),
    ),
    "publication made again": Break(
        "publication .* has been recreated",
        ("CREATE PUBLICATION {publication} FOR TABLE ONLY public.t",),
        ("DROP PUBLICATION {publication}",),
    ),
    "publication's operations": Break(
        "publication .* has been altered",
        first=("ALTER PUBLICATION {publication} SET (publish = 'insert')",),
        kind=CdcError,
    ),
    "publication's operations for a while": Break(
        "publication .* has been altered",
        ("ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')",),
        ("ALTER PUBLICATION {publication} SET (publish = 'insert')",),
    ),
    "publication dropped": Break("publication .* no longer exists", first=("DROP PUBLICATION {publication}",)),
    "record beyond the end of the log": Break(
        "has been set back", target=(f"UPDATE airflow_cdc.pipelines SET applied_lsn = '{LAST_LSN}'",)
    ),
    "open H beyond the end of the log": Break(
        "has been set back", target=(f"UPDATE airflow_cdc.chunks SET high_lsn = '{LAST_LSN}' WHERE chunk = 0",)
    ),
    "target table dropped": Break(
        r"target tables of the pipeline no longer exist: public\.t",
        target=("DROP TABLE public.t",),
        solution="resnapshot --table public.t",
    ),
}


# A changelog shows more than a mirror: what is lost, and what is there twice. Where both are recreated, both are
# tested.
CASES = [("changelog", name) for name in BREAKS]
CASES += [("mirror", name) for name in ("slot dropped", "slot advanced", "target table dropped")]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_a_break_is_refused_and_healed(make_pipeline: Make, mode: Mode, name: str) -> None:
    pipeline, break_ = make_pipeline(mode), BREAKS[name]
    names = pipeline.pipeline.source

    def statements(templates: tuple[str, ...]) -> list[str]:
        return [template.format(slot=names.slot, publication=names.publication) for template in templates]

    pipeline.source(*statements(break_.first), *LOST, *statements(break_.source))
    pipeline.target(*statements(break_.target))
    solution = refused(pipeline, break_.kind, break_.words)
    assert break_.solution in solution
    carry_out(pipeline, solution)
    assert_healed(pipeline)


# Statements on the publication of a table before the writes, and after them.
OTHERWISE_PUBLISHED = {
    "out": ("DROP TABLE public.t", None),
    "out and in": ("DROP TABLE public.t", "ADD TABLE public.t"),
    "rows": ("SET TABLE ONLY public.t WHERE (id < 50)", None),
    "rows for a while": ("SET TABLE ONLY public.t WHERE (id < 50)", "SET TABLE ONLY public.t"),
    "columns": ("SET TABLE ONLY public.t (id)", None),
    "columns for a while": ("SET TABLE ONLY public.t (id)", "SET TABLE ONLY public.t"),
}


@pytest.mark.parametrize("name", OTHERWISE_PUBLISHED)
def test_a_table_that_was_published_otherwise(make_pipeline: Make, name: str) -> None:
    pipeline = make_pipeline()
    alter = f"ALTER PUBLICATION {pipeline.pipeline.source.publication} "
    before, after = OTHERWISE_PUBLISHED[name]
    pipeline.source(alter + before, *LOST, *([alter + after] if after else []))
    for _ in range(2):  # it does not go away
        with pytest.raises(CannotFollow, match=r"public\.t") as refusal:
            pipeline.apply()
        with suppress(MissingPrivilege):  # where it is otherwise still published
            pipeline.provision()
    carry_out(pipeline, refusal.value.solution)
    pipeline.apply()
    assert_healed(pipeline)


def test_a_publication_that_is_changed_and_the_record_is_not(
    make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-read ends between its change of the publication and its commit: commands refuse until it is repeated."""
    pipeline = make_pipeline()
    pipeline.change(source={"tables": [{"table": "public.t", "columns": ["id"]}]})
    with monkeypatch.context() as patch:
        patch.setattr(reread, "plan_chunk_read", raise_(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source(*LOST)
    pipeline.change(source={"tables": ["public.t"]})
    with pytest.raises(CannotFollow, match="has been altered as to") as refusal:
        pipeline.apply()
    carry_out(pipeline, refusal.value.solution)
    assert_healed(pipeline)


def raise_(error: BaseException) -> Callable[..., Any]:
    def raising(*_: object) -> Any:
        raise error

    return raising


def test_an_overtaken_run_changes_nothing(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    publication = pipeline.pipeline.source.publication
    with run_part(pipeline.pipeline, "resnapshot", None, False) as (run, record):
        run.sink.take_epoch("another run")
        pipeline.source(f"ALTER PUBLICATION {publication} DROP TABLE public.t")
        with pytest.raises(Fenced):
            reread.reread_as_defined(run, "public.t", Barriers())
        assert pipeline.source_rows("SELECT * FROM pg_publication_tables") == []
        with pytest.raises(Fenced):
            run.sink.restart(run.epoch, record.targets, record.identity, 1)
        assert pipeline.record.applied == record.applied


PUBLICATIONS = {"all tables": "ALL TABLES", "a schema": "TABLES IN SCHEMA public", "by its owner": "TABLE public.t"}


@pytest.mark.parametrize("name", PUBLICATIONS)
def test_publications_that_others_have_made(databases: Databases, tmp_path: Path, name: str) -> None:
    """They are used as they are, and kept; changes to them are found, and their owner repairs them."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    publication = pipeline.pipeline.source.publication
    pipeline.source(TABLE, ROWS, f"CREATE PUBLICATION {publication} FOR {PUBLICATIONS[name]}")
    pipeline.provision()
    pipeline.copy()
    pipeline.source(*LOST)
    assert_healed(pipeline)
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.apply()
    if name == "a schema":
        alter = f"ALTER PUBLICATION {publication} {{}} TABLES IN SCHEMA public"
        pipeline.source(alter.format("DROP"), "DELETE FROM public.t WHERE id = 8", alter.format("ADD"))
        with pytest.raises(CannotFollow, match="has been altered as to") as refusal:
            pipeline.apply()
        carry_out(pipeline, refusal.value.solution)
        pipeline.apply()
        pipeline.assert_equal()
    pipeline.source(f"ALTER PUBLICATION {publication} SET (publish = 'insert')", "DELETE FROM public.t WHERE id = 9")
    solution = refused(pipeline, CdcError, "has been altered")
    with pytest.raises(ServerNotReady, match="does not publish all operations") as wrong:
        carry_out(pipeline, solution)
    pipeline.source(wrong.value.solution.partition(": ")[2])
    carry_out(pipeline, solution)
    pipeline.source("UPDATE public.t SET body = 'goes on' WHERE id = 10")
    pipeline.apply()
    pipeline.assert_equal()


def test_a_slot_of_another_plugin_in_place_of_ours(
    make_pipeline: Make, make_server: ServerMaker, system_binaries: Path
) -> None:
    """The pipeline could not parse its texts, and it has another owner, so it is reported and left alone."""
    pipeline = make_pipeline("changelog", make_server(binaries=system_binaries))
    slot = pipeline.pipeline.source.slot
    create = f"SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')"
    pipeline.source(*LOST, DROP_SLOT.format(slot=slot), create)
    kept = pipeline.source_rows("SELECT slot_name, plugin, restart_lsn::text FROM pg_replication_slots")
    solution = refused(pipeline, GateClosed, "is not ours: plugin 'test_decoding'")
    with pytest.raises(GateClosed, match="is not ours"):
        carry_out(pipeline, solution)
    pipeline.change(source={"slot": f"{slot}_new"})
    carry_out(pipeline, solution)
    assert_healed(pipeline)
    commands.drop(pipeline.pipeline)
    assert pipeline.source_rows("SELECT slot_name, plugin, restart_lsn::text FROM pg_replication_slots") == kept


@pytest.mark.parametrize("foreign", ["physical", "of another database"])
def test_a_slot_that_others_have_made_in_place_of_ours(
    make_pipeline: Make, databases: Databases, source_server: PostgresServer, foreign: str
) -> None:
    """It is never dropped, whatever the pipeline's file contains; under another name the pipeline is repaired."""
    pipeline = make_pipeline("changelog")
    slot = pipeline.pipeline.source.slot
    pipeline.source(*LOST, f"SELECT pg_drop_replication_slot('{slot}')")
    if foreign == "physical":
        pipeline.source(f"SELECT pg_create_physical_replication_slot('{slot}')")
    else:
        execute(source_server.dsn(), f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    kept = pipeline.source_rows("SELECT slot_name, plugin, database, restart_lsn::text FROM pg_replication_slots")
    try:
        solution = refused(pipeline, GateClosed, "is not ours")
        assert "source.slot" in solution
        with pytest.raises(GateClosed, match="is not ours"):
            carry_out(pipeline, solution)
        # A name that is another pipeline's slot is refused as well.
        pipeline.source(f"SELECT pg_create_logical_replication_slot('{slot}_taken', 'pgoutput')")
        pipeline.change(source={"slot": f"{slot}_taken"})
        with pytest.raises(GateClosed, match="exists, but the sink has no record"):
            carry_out(pipeline, solution)
        pipeline.change(source={"slot": f"{slot}_new"})
        carry_out(pipeline, solution)
        assert_healed(pipeline)
        commands.drop(pipeline.pipeline)
        left = pipeline.source_rows("SELECT slot_name, plugin, database, restart_lsn::text FROM pg_replication_slots")
        assert [row for row in left if row[0] == slot] == [row for row in kept if row[0] == slot]
        assert f"{slot}_taken" in {row[0] for row in left}
        assert f"{slot}_new" not in {row[0] for row in left}
    finally:
        execute(source_server.dsn(), f"SELECT pg_drop_replication_slot('{slot}')")


def test_another_cluster_behind_the_same_name(
    make_pipeline: Make, databases: Databases, target_server: PostgresServer
) -> None:
    """The address now leads to a server with other contents, but with a slot and a publication of the same names."""
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    other = f"other_{pipeline.name}"
    create_database(target_server, other)
    try:
        execute(
            target_server.dsn(other),
            TABLE,
            ROWS,
            f"CREATE PUBLICATION {names.publication} FOR TABLE ONLY public.t",
            f"SELECT pg_create_logical_replication_slot('{names.slot}', 'pgoutput')",
            *LOST,
        )
        pipeline.databases = Databases(target_server.dsn(other), databases.target)
        pipeline.change(source={"dsn": target_server.dsn(other)})
        solution = refused(pipeline, GateClosed, "is not the one that the sink was filled from")
        assert "`source.dsn` is wrong" in solution
        carry_out(pipeline, solution)
        assert_healed(pipeline)
    finally:
        drop_database(target_server, other)
        pipeline.databases = databases


def test_a_changelog_whose_source_begins_again_at_lower_positions(make_pipeline: Make) -> None:
    """Events are ordered by their LSNs, so a log that has been reset cannot be appended."""
    pipeline = make_pipeline("changelog")
    pipeline.target(f"UPDATE public.t SET _commit_lsn = '{LAST_LSN}' WHERE body = 'streamed'")
    pipeline.source(*LOST, f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    solution = refused(pipeline, GateClosed, "no longer exists")
    with pytest.raises(GateClosed, match="timeline that the source has abandoned") as older:
        carry_out(pipeline, solution)
    assert pipeline.source_rows("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [
        (0,)
    ]
    pipeline.target("ALTER TABLE public.t RENAME TO history")
    carry_out(pipeline, older.value.solution)
    assert_healed(pipeline)


def test_a_table_that_is_dropped_at_the_target_in_the_middle_of_the_copy(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    provisioning.start_over(pipeline.pipeline, takeover=False)
    pipeline.source(*LOST)
    pipeline.target("DROP TABLE public.t")
    solution = refused(pipeline, GateClosed, "no longer exist")
    carry_out(pipeline, solution)
    assert_healed(pipeline)
