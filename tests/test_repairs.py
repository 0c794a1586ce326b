"""What breaks the link between slot and record: refused before a change is lost, and healed as the message says.

Each case breaks something while the pipeline stands still, writes on, and finds every command refused with exit code 3,
with the target untouched. Then the command that the message names is carried out, and source and target are equal
again, including what was written while it was broken; a changelog tells no change twice.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from psycopg import pq
from pyspark.errors import PySparkException

from airflow_cdc_provider.demo.servers import PostgresServer, await_condition
from airflow_cdc_provider.engine import cli, commands, provisioning, reread
from airflow_cdc_provider.engine.barriers import Barriers
from airflow_cdc_provider.engine.buffer import Position
from airflow_cdc_provider.engine.errors import (
    CannotFollow,
    CdcError,
    ExitCode,
    Fenced,
    ForeignTable,
    GateClosed,
    MissingPrivilege,
    SecondWriter,
    ServerNotReady,
)
from airflow_cdc_provider.engine.run import run_part
from airflow_cdc_provider.engine.state import State
from airflow_cdc_provider.engine.stream import StreamJob
from airflow_cdc_provider.engine.wal import WalReader
from tests.conftest import Databases, ServerMaker, create_database, drop_database
from tests.pipelines import SECONDS, PipelineUnderTest, execute, query_rows

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n"
LOST = (
    "UPDATE public.t SET body = 'lost' WHERE id = 2",
    "DELETE FROM public.t WHERE id = 3",
    "INSERT INTO public.t VALUES (100, 'lost')",
)
AGAIN = (
    "UPDATE public.t SET body = body || ' again' WHERE id IN (2, 100)",
    "DELETE FROM public.t WHERE id = 4",
    "INSERT INTO public.t VALUES (3, 'again')",
)

Make = Callable[..., PipelineUnderTest]
Mode = Literal["mirror", "changelog"]


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Make]:
    """Makes a pipeline of ``public.t`` whose snapshot is done and whose stream has applied a change."""
    made: list[PipelineUnderTest] = []

    def make(mode: Mode = "mirror", server: PostgresServer | None = None) -> PipelineUnderTest:
        pair = databases if server is None else Databases(server.dsn(), databases.target)
        settings = {"sink": {"mode": mode}, "snapshot": {"chunk_rows": 10}}
        pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], **settings)
        pipeline.source(TABLE, ROWS)
        pipeline.provision()
        pipeline.copy()
        pipeline.source("UPDATE public.t SET body = 'streamed' WHERE id = 1")
        pipeline.apply()
        made.append(pipeline)
        return pipeline

    yield make
    for pipeline in made:
        pipeline.end_commands()


def refused(pipeline: PipelineUnderTest, kind: type[CdcError], words: str) -> str:
    """Check that streaming and provisioning are refused, and touch nothing; return the solution."""
    before = content(pipeline)
    with pytest.raises(kind, match=words) as streaming:
        pipeline.apply()
    with pytest.raises(kind):
        pipeline.provision()
    assert streaming.value.exit_code == ExitCode.REFUSED
    assert content(pipeline) == before
    return streaming.value.solution


def content(pipeline: PipelineUnderTest) -> list[tuple[Any, ...]]:
    """The rows of the target, none if it is gone."""
    if pipeline.target_rows("SELECT to_regclass('public.t')") == [(None,)]:
        return []
    return pipeline.target_rows("SELECT * FROM public.t ORDER BY ctid")


def carry_out(pipeline: PipelineUnderTest, solution: str) -> None:
    """Carry out the ``resnapshot`` that a solution names, in this process."""
    found = re.search(r"`airflow-cdc (resnapshot [^`]+)`", solution)
    assert found, solution
    options = cli._parser().parse_args([*shlex.split(found[1]), "--pipeline", str(pipeline.file)])
    if options.all:
        provisioning.start_over(pipeline.pipeline, takeover=False)
        pipeline.copy()
    else:
        commands.resnapshot(pipeline.pipeline, tables=options.table)


def assert_healed(pipeline: PipelineUnderTest) -> None:
    """Changes flow again, and both sides are equal; in a changelog nothing stands twice."""
    pipeline.source(*AGAIN)
    pipeline.apply()
    pipeline.assert_verified()
    if pipeline.pipeline.sink.mode == "mirror":
        pipeline.assert_equal()
        return
    events = "SELECT id, _op, _commit_lsn, _seq, _xid FROM public.t WHERE _op <> 't'"
    assert pipeline.target_rows(f"{events} GROUP BY 1, 2, 3, 4, 5 HAVING count(*) > 1") == []
    reads = "SELECT id, _commit_lsn FROM public.t WHERE _op = 'r' GROUP BY 1, 2 HAVING count(*) > 1"
    assert pipeline.target_rows(reads) == []
    # The three changes after the repair stand there once each, as changes.
    again = "SELECT _op::text, id FROM public.t WHERE body LIKE '%again' AND _op <> 'r' OR _op = 'd' AND id = 4"
    assert sorted(pipeline.target_rows(again)) == [("d", 4), ("i", 3), ("u", 2), ("u", 100)]


@dataclass(frozen=True)
class Break:
    """What is done to a pipeline that stands still.

    :param source: statements on the source, after the writes.
    :param first: statements before them.
    :param target: statements on the target.
    :param words: what the refusal says.
    :param solution: what its solution says beside the repair.
    :param kind: what every command is refused with.
    """

    words: str
    source: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    solution: str = "resnapshot"
    kind: type[CdcError] = GateClosed


DROP_SLOT = "SELECT pg_drop_replication_slot('{slot}')"
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


# A changelog shows more than a mirror: what is lost, and what stands twice. Where both are made anew, both are tested.
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


# What is done to the publication of a table before the writes, and after them.
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
    for _ in range(2):  # it does not wear off
        with pytest.raises(CannotFollow, match=r"public\.t") as refusal:
            pipeline.apply()
        with suppress(MissingPrivilege):  # where it is still published otherwise
            pipeline.provision()
    carry_out(pipeline, refusal.value.solution)
    pipeline.apply()
    assert_healed(pipeline)


def test_a_publication_that_is_changed_and_the_record_is_not(
    make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-read that ends between its change of the publication and its commit: refused until it is done again."""
    pipeline = make_pipeline()
    pipeline.change(source={"tables": [{"table": "public.t", "columns": ["id"]}]})
    with monkeypatch.context() as patch:
        patch.setattr(reread, "plan_read", raise_(KeyboardInterrupt()))
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
            reread.adopt(run, "public.t", Barriers())
        assert pipeline.source_rows("SELECT * FROM pg_publication_tables") == []
        with pytest.raises(Fenced):
            run.sink.restart(run.epoch, record.targets, record.identity, 1)
        assert pipeline.record.applied == record.applied


PUBLICATIONS = {"all tables": "ALL TABLES", "a schema": "TABLES IN SCHEMA public", "by its owner": "TABLE public.t"}


@pytest.mark.parametrize("name", PUBLICATIONS)
def test_publications_that_others_have_made(databases: Databases, tmp_path: Path, name: str) -> None:
    """They are taken as they are, and stay; what is altered of them is found, and mended by their owner."""
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


@pytest.mark.parametrize("foreign", ["physical", "of another database"])
def test_a_slot_that_others_have_made_in_place_of_ours(
    make_pipeline: Make, databases: Databases, source_server: PostgresServer, foreign: str
) -> None:
    """It is never dropped, whatever the pipeline's file says; under another name the pipeline is repaired."""
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
        # A name that is another pipeline's slot will not do either.
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
    """The address now leads to a server that was filled otherwise, with a slot and a publication of the same names."""
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
    """Events are ordered by their LSNs, so that a log that has been set back cannot be appended."""
    pipeline = make_pipeline("changelog")
    pipeline.target(f"UPDATE public.t SET _commit_lsn = '{LAST_LSN}' WHERE body = 'streamed'")
    pipeline.source(*LOST, f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    solution = refused(pipeline, GateClosed, "no longer exists")
    with pytest.raises(GateClosed, match="history that the source has left") as older:
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


# -- log that is gone ----------------------------------------------------------------------------------


def write_log(pipeline: PipelineUnderTest, megabytes: int) -> None:
    """Write log that no captured table is in, and let the server remove what it need not keep."""
    for _ in range(megabytes):
        pipeline.source("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1 << 20))")
    pipeline.source("SELECT pg_switch_wal()", "CHECKPOINT")


def wal_status(pipeline: PipelineUnderTest) -> str:
    return str(commands.status(pipeline.pipeline)["slot"]["wal_status"])


@pytest.mark.parametrize(("version", "reason"), [("16", "wal_status = lost"), ("18", "wal_status = lost, wal_removed")])
def test_a_slot_that_has_lost_its_log(make_pipeline: Make, make_server: ServerMaker, version: str, reason: str) -> None:
    """Newer servers also say why."""
    settings = {"max_slot_wal_keep_size": "2MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    pipeline = make_pipeline("changelog", make_server(version, settings))
    pipeline.source(*LOST)
    write_log(pipeline, 40)
    assert wal_status(pipeline) == "lost"
    solution = refused(pipeline, GateClosed, rf"has lost the log it needs \({reason}\)")
    assert "max_slot_wal_keep_size" in solution
    carry_out(pipeline, solution)
    assert_healed(pipeline)


def test_a_slot_that_is_about_to_lose_its_log(
    make_pipeline: Make, make_server: ServerMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost yet, and nothing but going on can keep it so: a warning, and the stream catches up."""
    server = make_server(settings={"max_slot_wal_keep_size": "1MB", "checkpoint_timeout": "1h", "max_wal_size": "4GB"})
    pipeline = make_pipeline("changelog", server)
    pipeline.source(*LOST)
    for _ in range(40):
        pipeline.source("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1 << 20))")
    assert wal_status(pipeline) == "unreserved"
    assert_healed(pipeline)
    assert "wal_status = unreserved" in caplog.text
    pipeline.source("SELECT pg_log_standby_snapshot()")
    pipeline.apply()
    assert wal_status(pipeline) == "reserved"


def test_a_slot_that_has_been_invalidated(make_pipeline: Make, make_server: ServerMaker) -> None:
    """Postgres 18 gives up slots that nobody has used for a while."""
    pipeline = make_pipeline("changelog", make_server("18", {"idle_replication_slot_timeout": "1s"}))
    pipeline.source(*LOST)
    query = f"SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"

    def invalidated() -> bool:
        pipeline.source("CHECKPOINT")
        return pipeline.source_rows(query) == [("idle_timeout",)]

    assert await_condition(invalidated, SECONDS)
    solution = refused(pipeline, GateClosed, "lost, idle_timeout")
    assert "idle_replication_slot_timeout" in solution
    pipeline.source("ALTER SYSTEM SET idle_replication_slot_timeout = 0", "SELECT pg_reload_conf()")
    carry_out(pipeline, solution)
    assert_healed(pipeline)


# -- the sink's record ---------------------------------------------------------------------------------


def copy_target(server: PostgresServer, pipeline: PipelineUnderTest, backup: str) -> None:
    """A backup of the target database."""
    execute(server.dsn(), f"CREATE DATABASE {backup} TEMPLATE {pipeline.name}")


def restore_target(server: PostgresServer, pipeline: PipelineUnderTest, backup: str) -> None:
    """Put the backup in the place of the target database."""
    drop_database(server, pipeline.name)
    execute(server.dsn(), f"ALTER DATABASE {backup} RENAME TO {pipeline.name}")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_target_that_is_restored_from_a_backup(
    make_pipeline: Make, target_server: PostgresServer, mode: Mode
) -> None:
    """The slot has been told more than the backup holds, so that the log in between is gone."""
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
    """Units that were committed and not acknowledged are streamed again, from where the backup's record says."""
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
    """The state vouches for slot and targets, and nothing of before can commit under the record that is made anew."""
    pipeline = make_pipeline(mode)
    sink, before = commands.sink_of(pipeline.pipeline), pipeline.record
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
    """Nobody knows under which definition the rows were written; and tables that have joined only the file are not
    ours."""
    pipeline = make_pipeline()
    pipeline.source(*LOST, "ALTER TABLE public.t ADD b int", "CREATE TABLE public.u (id int PRIMARY KEY)")
    pipeline.target("DROP SCHEMA airflow_cdc CASCADE")
    solution = refused(pipeline, GateClosed, "no commit record")
    before = content(pipeline)
    with pytest.raises(ForeignTable, match=r"is not defined as public\.t is now; its columns would be id int"):
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


def test_another_sink_is_not_taken_for_one_that_has_lost_its_record(
    make_pipeline: Make, target_server: PostgresServer
) -> None:
    pipeline = make_pipeline()
    other = f"other_{pipeline.name}"
    create_database(target_server, other)
    try:
        execute(target_server.dsn(other), TABLE, ROWS)
        pipeline.change(sink={"dsn": target_server.dsn(other)})
        with pytest.raises(GateClosed, match=r"no commit record .* does not tell"):
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
    """What nothing vouches for is not continued, nor taken for ours: the pipeline begins anew, as the messages say."""
    pipeline = make_pipeline()
    pipeline.source(*LOST)
    pipeline.target("DROP SCHEMA airflow_cdc CASCADE")
    shutil.rmtree(pipeline.state)
    with pytest.raises(GateClosed, match="no commit record") as missing:
        pipeline.apply()
    assert "airflow-cdc provision" in missing.value.solution
    with pytest.raises(GateClosed, match=r"no commit record .* does not tell"):
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


# -- what may be lost ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_state_that_is_gone(make_pipeline: Make, mode: Mode) -> None:
    pipeline = make_pipeline(mode)
    pipeline.source(*LOST)
    shutil.rmtree(pipeline.state)
    assert_healed(pipeline)


def test_a_checkpoint_is_kept_only_if_the_record_bears_it_out(make_pipeline: Make) -> None:
    """It is a cursor: one ahead of the record would skip what has never been applied, so it is made anew."""
    pipeline = make_pipeline()
    with run_part(pipeline.pipeline, "snapshot-0", None) as (run, record):
        job = StreamJob(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        for ahead, block, committed, kept in (
            (0, 0, True, True),
            (0, 0, False, True),
            (-8, 0, True, True),
            (-8, 0, False, False),
            (8, 0, True, False),
            (8, 0, False, False),
            (0, 1, True, False),
        ):
            checkpoint = write_checkpoint(pipeline, Position(record.applied + ahead, block), committed)
            job._discard_foreign_checkpoint()
            assert checkpoint.exists() is kept, (ahead, block, committed)
        for torn in ("metadata", "offsets/6", "offsets/7", "commits/7"):
            for content_left in ("", "v1", "v1\n{", "\0" * 20, "[]"):
                checkpoint = write_checkpoint(pipeline, Position(record.applied), True)
                (checkpoint / torn).write_text(content_left)
                job._discard_foreign_checkpoint()
                assert not checkpoint.exists(), (torn, content_left)
        for lacking in ({7}, {6}, {6, 5}, {5}, {7, 6, 5}):  # with the last but one, all that Spark reads is there
            checkpoint = write_checkpoint(pipeline, Position(record.applied), True)
            (checkpoint / "offsets" / "5").write_text((checkpoint / "offsets" / "6").read_text())
            for batch in lacking:
                (checkpoint / "offsets" / str(batch)).unlink()
            job._discard_foreign_checkpoint()
            assert checkpoint.exists() is (lacking == {5}), lacking


def write_checkpoint(pipeline: PipelineUnderTest, position: Position, committed: bool) -> Path:
    """A checkpoint as Spark leaves it after some batches; gives its directory."""
    checkpoint = pipeline.state / "checkpoint"
    State(pipeline.pipeline.state).remove("checkpoint")
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"5a1e"}')
    for batch in (6, 7):
        (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(position.to_json())}")
        if batch == 6 or committed:
            (checkpoint / "commits" / str(batch)).write_text("v1\n{}")
    return checkpoint


class _Unstoppable:
    """A query of Spark that does not end when it is told to."""

    isActive = True

    def stop(self) -> None:
        raise PySparkException("the query did not end within its time limit")


def test_a_query_that_does_not_stop_hides_no_error(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    drop_slot = DROP_SLOT.format(slot=pipeline.pipeline.source.slot)
    with suppress(GateClosed), run_part(pipeline.pipeline, "stream", None) as (run, record):
        job = StreamJob(None, run, record, lambda progress: None)  # type: ignore[arg-type]
        pipeline.source(drop_slot)
        with pytest.raises(GateClosed, match="no longer exists"):
            job._follow(_Unstoppable(), None)  # type: ignore[arg-type]


# -- a slot in other hands -----------------------------------------------------------------------------


@contextmanager
def foreign_reader(pipeline: PipelineUnderTest) -> Iterator[int]:
    """A session of another program that streams from the pipeline's slot, and acknowledges nothing; gives its pid."""
    names = pipeline.pipeline.source
    reader = pq.PGconn.connect(f"{names.dsn}?replication=database&application_name=somebody".encode())
    options = f"proto_version '1', publication_names '{names.publication}'"
    try:
        started = reader.exec_(f"START_REPLICATION SLOT {names.slot} LOGICAL 0/0 ({options})".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, reader.error_message
        yield reader.backend_pid
    finally:
        reader.finish()


def test_a_slot_that_somebody_else_reads_from(make_pipeline: Make) -> None:
    """The reader is named and left alone; commands that do not need the slot go on working."""
    pipeline = make_pipeline()
    active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"
    pipeline.source(*LOST)
    before = pipeline.record
    with foreign_reader(pipeline) as pid:
        for command in (
            pipeline.apply,
            pipeline.provision,
            lambda: commands.drop(pipeline.pipeline),
            lambda: provisioning.start_over(pipeline.pipeline, takeover=False),
        ):
            with pytest.raises(SecondWriter, match=f"session {pid} of \\w+, application 'somebody'") as named:
                command()
            assert f"pg_terminate_backend({pid})" in named.value.solution
        assert commands.status(pipeline.pipeline)["slot"]["active"] is True
        assert commands.stop(pipeline.pipeline) == {"asked": []}
        assert commands.verify(pipeline.pipeline)["equal"] is False
        assert pipeline.record.applied == before.applied
        assert pipeline.source_rows(active) == [(True,)]
        pipeline.source(f"SELECT pg_terminate_backend({pid})")
        assert await_condition(lambda: pipeline.source_rows(active) == [(False,)], SECONDS)
        assert_healed(pipeline)


def test_a_walsender_that_an_earlier_run_has_left(make_pipeline: Make) -> None:
    """It carries our name, so that the next run ends it."""
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    pipeline.source(*LOST)
    left = WalReader(names.dsn, names.slot, names.publication, pipeline.record.applied)
    try:
        active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{names.slot}'"
        assert pipeline.source_rows(active) == [(True,)]
        assert_healed(pipeline)
    finally:
        left.close()
