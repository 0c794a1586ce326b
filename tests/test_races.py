"""The interleavings in which rows are lost, doubled or stale, each made to happen on real servers.

Postgres commits in steps: the commit record is written, a synchronous standby may be waited for, and only then do
other snapshots see it, while logical decoding has delivered it already; an asynchronous commit is the reverse, seen
before it is durable. Chunks are read in snapshots of their own in between. Every test here fails if the rule that it
is about is broken. Most run the engine's parts in this process, because only so can a test say what happens between
two of them; what Spark adds is tested with the command line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from airflow_cdc_provider.demo.servers import PostgresServer, await_condition
from airflow_cdc_provider.engine import commands, slot
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import Blocked, Fenced, StreamFailed
from airflow_cdc_provider.engine.lsn import parse_lsn
from airflow_cdc_provider.engine.reading import SnapshotReader
from airflow_cdc_provider.engine.run import sink_of
from airflow_cdc_provider.engine.sinks.base import Watermark
from airflow_cdc_provider.engine.snapshot import copy_chunk
from airflow_cdc_provider.engine.source import SlotStreamReader, SourceOptions
from tests.conftest import PIPELINE_ROLE, Databases, ServerMaker
from tests.pipelines import PipelineUnderTest, chunk_task, copy_chunk_of, execute, query_rows, transaction
from tests.standby import WITHOUT_STANDBY, commits_that_wait

SECONDS = 60.0
# Long enough, and hard enough to compress, to be stored out of line, so that updates do not send it.
BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"
TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text, big text)"
ROWS = f"INSERT INTO public.t SELECT n, 'row ' || n, {BIG.format('n')} FROM generate_series(1, 20) n"

Make = Callable[..., PipelineUnderTest]
Mode = Literal["mirror", "changelog"]


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Make]:
    """Makes a pipeline of ``public.t``, whose twenty rows are two chunks: up to 10, and from 11 on.

    Its source is a database of the session's server, or of a server of the test's own.
    """
    made: list[PipelineUnderTest] = []

    def make(server: PostgresServer | None = None, mode: Mode = "mirror") -> PipelineUnderTest:
        pair = databases if server is None else Databases(server.dsn(), databases.target)
        pipeline = PipelineUnderTest(
            tmp_path, pair, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": 10, "parallelism": 1}
        )
        pipeline.source(TABLE, ROWS)
        made.append(pipeline)
        return pipeline

    yield make
    for pipeline in made:
        pipeline.end_commands()


def events(pipeline: PipelineUnderTest) -> list[tuple[Any, ...]]:
    """The changes of a changelog, in order: what, key, old key, columns that were not sent."""
    return pipeline.target_rows(
        "SELECT _op::text, id, (_before ->> 'id')::int, _unchanged FROM public.t WHERE _op <> 'r'"
        " ORDER BY _commit_lsn, _seq"
    )


def await_waiting(dsn: str, condition: str) -> None:
    """Wait until a session of the server is in a state."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND {condition}"
    assert await_condition(lambda: query_rows(dsn, query) != [(0,)], SECONDS), condition


# -- a commit that waits for a synchronous standby -----------------------------------------------------


@pytest.fixture
def standby_source(make_server: ServerMaker) -> PostgresServer:
    """A source whose synchronous standby does not exist: who wants to wait for it, waits."""
    return make_server(settings=WITHOUT_STANDBY)


def test_a_commit_that_is_visible_only_after_the_chunk_was_read(
    standby_source: PostgresServer, make_pipeline: Make
) -> None:
    """The commit lies before H in the log and is not in the chunk: only its transaction's visibility tells."""
    pipeline = make_pipeline(standby_source)
    pipeline.provision()
    changes = (
        "INSERT INTO public.t VALUES (100, 'inserted', 'x')",
        "UPDATE public.t SET body = 'updated' WHERE id = 3",
        "DELETE FROM public.t WHERE id = 15",
    )
    with commits_that_wait(standby_source, *changes) as release:
        written = parse_lsn(str(pipeline.source_rows("SELECT pg_current_wal_lsn()::text")[0][0]))
        pipeline.copy()
        assert pipeline.record.high > written
        assert pipeline.target_rows("SELECT count(*), max(body) FROM public.t WHERE id IN (3, 15, 100)") == [
            (2, "row 3")
        ]
        # The stream delivers them before the source itself shows them.
        pipeline.apply()
        found = "SELECT id, body FROM public.t WHERE id IN (3, 15, 100) ORDER BY id"
        assert pipeline.target_rows(found) == [(3, "updated"), (100, "inserted")]
        assert pipeline.source_rows(found) == [(3, "row 3"), (15, "row 15")]
        release()
    pipeline.assert_equal()


def test_a_commit_that_waits_across_slot_and_barrier(standby_source: PostgresServer, make_pipeline: Make) -> None:
    """Its commit record lies before the slot, so that it is not streamed; chunks must not be read before it is seen."""
    pipeline = make_pipeline(standby_source)
    pipeline.source(f"GRANT pg_monitor TO {PIPELINE_ROLE}")  # who waits for a standby, not everybody may know
    names = pipeline.pipeline.source
    change = "UPDATE public.t SET body = 'updated' WHERE id = 3"
    with commits_that_wait(standby_source, change) as release:
        for step in (
            lambda: slot.create_slot(source, names.slot, timeout=0.5),
            lambda: slot.barrier(source, timeout=0.5),
        ):
            with connected(names.dsn) as source, pytest.raises(Blocked, match="SyncRep") as blocked:
                step()
            assert "standby" in blocked.value.solution
        assert pipeline.source_rows("SELECT slot_name FROM pg_replication_slots") == []
        with ThreadPoolExecutor(1) as pool:
            provisioned = pool.submit(pipeline.provision)
            await_waiting(
                pipeline.databases.source,
                "wait_event_type = 'Lock' AND query LIKE '%pg_create_logical_replication_slot%'",
            )
            release()
            provisioned.result(SECONDS)
    pipeline.copy()
    pipeline.source("UPDATE public.t SET body = 'later' WHERE id = 4")
    pipeline.apply()
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 3") == [("updated",)]
    pipeline.assert_equal()


# -- open transactions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_transaction_that_is_open_across_chunks(make_pipeline: Make, mode: Mode) -> None:
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    dsn = pipeline.databases.source
    with transaction(dsn, "UPDATE public.t SET body = 'open' WHERE id IN (2, 12)") as open_:
        pipeline.copy(0)
        open_.execute("DELETE FROM public.t WHERE id IN (3, 13)")
        open_.execute("INSERT INTO public.t VALUES (-1, 'open', NULL), (101, 'open', NULL)")
        # A younger transaction that is over before, so that ids alone do not tell what a snapshot sees.
        pipeline.source("UPDATE public.t SET body = 'closed' WHERE id IN (4, 14)")
        pipeline.copy(1)
        open_.commit()
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        return
    # The second chunk has seen the closed transaction, the first has not; neither has seen the open one.
    assert sorted(event[:2] for event in events(pipeline)) == [
        ("d", 3),
        ("d", 13),
        ("i", -1),
        ("i", 101),
        ("u", 2),
        ("u", 4),
        ("u", 12),
    ]
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE _op = 'r'") == [(20,)]


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_transaction_that_ends_between_two_chunks(make_pipeline: Make, mode: Mode) -> None:
    """The first chunk's snapshot lists it as running although its id is below others that are over."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    with transaction(pipeline.databases.source, "UPDATE public.t SET body = 'open' WHERE id IN (2, 12)") as open_:
        pipeline.source("UPDATE public.t SET body = 'closed' WHERE id IN (4, 14)")
        pipeline.copy(0)
        open_.commit()
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
    else:
        assert [event[:2] for event in events(pipeline)] == [("u", 2)]


def test_a_transaction_that_is_open_across_the_barrier(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    with transaction(pipeline.databases.source, "UPDATE public.t SET body = 'open' WHERE id = 2") as open_:
        for step in (
            lambda: slot.create_slot(source, names.slot, timeout=0.5),
            lambda: slot.barrier(source, timeout=0.5),
        ):
            with connected(names.dsn) as source, pytest.raises(Blocked, match=f"session {open_.info.backend_pid} "):
                step()
        with ThreadPoolExecutor(1) as pool:
            provisioned = pool.submit(pipeline.provision)
            await_waiting(
                pipeline.databases.source,
                "wait_event_type = 'Lock' AND query LIKE '%pg_create_logical_replication_slot%'",
            )
            open_.execute("INSERT INTO public.t VALUES (50, 'open', NULL)")
            open_.commit()
            provisioned.result(SECONDS)
    pipeline.copy()
    pipeline.apply()
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE body = 'open'") == [(2,)]
    pipeline.assert_equal()


def test_a_prepared_transaction_is_named(make_pipeline: Make) -> None:
    """It belongs to no session, so that only its own catalog shows it."""
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    with psycopg.connect(pipeline.databases.source, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE public.t SET body = 'prepared' WHERE id = 2")
        connection.execute(f"PREPARE TRANSACTION '{pipeline.name}'".encode())
    with connected(names.dsn) as source, pytest.raises(Blocked, match=f"prepared transaction '{pipeline.name}'"):
        slot.barrier(source, timeout=0.5)
    execute(pipeline.databases.source, f"COMMIT PREPARED '{pipeline.name}'")
    pipeline.provision()
    pipeline.copy()
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 2") == [("prepared",)]


# -- keys that move ------------------------------------------------------------------------------------

MOVES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[tuple[Any, ...]]]] = {
    # Neither chunk has the row, and the event's new half lacks the value that has not changed.
    "from an unread chunk to a read one": ((1,), (0,), [("i", 105, None, ["big"])]),
    # Both chunks have it, at its old key and at its new.
    "from a read chunk to an unread one": ((0,), (1,), [("d", 5, 5, None)]),
    "between read chunks": ((0, 1), (), [("u", 105, 5, ["big"])]),
    "between unread chunks": ((), (0, 1), []),
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_a_key_that_moves(
    make_pipeline: Make, mode: Mode, move: tuple[tuple[int, ...], tuple[int, ...], list[tuple[Any, ...]]]
) -> None:
    before, after, expected = move
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    if before:
        pipeline.copy(*before)
    pipeline.source("UPDATE public.t SET id = 105 WHERE id = 5")
    if after:
        pipeline.copy(*after)
    # A change that every filter lets through, of a row that the move has concerned.
    pipeline.source("UPDATE public.t SET body = 'moved' WHERE id = 105")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        big = pipeline.target_rows("SELECT length(big) FROM public.t WHERE id = 105")
        assert big == [(260 * 32,)]
    else:
        assert events(pipeline) == [*expected, ("u", 105, None, ["big"])]
        copied = pipeline.target_rows("SELECT id FROM public.t WHERE _op = 'r' ORDER BY 1")
        assert len(copied) == len(set(copied)) == sum(chunk.rows for chunk in pipeline.record.chunks)
    # The same again when the filter is closed.
    pipeline.source("UPDATE public.t SET id = 205 WHERE id = 105", "UPDATE public.t SET body = 'on' WHERE id = 205")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
    else:
        assert events(pipeline)[-2:] == [("u", 205, 105, ["big"]), ("u", 205, None, ["big"])]


def test_keys_within_one_transaction(make_pipeline: Make) -> None:
    """Two keys swapped by way of a third, a chain of moves, a row that is deleted and returns, all with big values."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy(1)
    with transaction(
        pipeline.databases.source,
        "UPDATE public.t SET id = -1 WHERE id = 3",
        "UPDATE public.t SET id = 3 WHERE id = 13",
        "UPDATE public.t SET id = 13 WHERE id = -1",
        "DELETE FROM public.t WHERE id = 4",
        "INSERT INTO public.t VALUES (4, 'returned', 'small')",
        "UPDATE public.t SET id = id + 1000 WHERE id >= 15",
        "DELETE FROM public.t WHERE id <= 10 AND id > 4",
        "UPDATE public.t SET id = id - 1010, body = 'shifted' WHERE id > 1015",
    ) as shuffle:
        pipeline.copy(0)
        shuffle.commit()
    pipeline.apply()
    pipeline.assert_equal()
    with transaction(
        pipeline.databases.source,
        "UPDATE public.t SET id = -1 WHERE id = 3",
        "UPDATE public.t SET id = 3 WHERE id = 13",
        "UPDATE public.t SET id = 13 WHERE id = -1",
        "DELETE FROM public.t WHERE id = 13",
        "INSERT INTO public.t SELECT 13, body, big FROM public.t WHERE id = 3",
    ) as shuffle:
        shuffle.commit()
    pipeline.apply()
    pipeline.assert_equal()


# -- a source that crashes -----------------------------------------------------------------------------


@pytest.fixture
def asynchronous_source(make_server: ServerMaker) -> PostgresServer:
    """A source whose asynchronous commits stay in memory for as long as Postgres allows."""
    return make_server(settings={"wal_writer_delay": "10s", "autovacuum": "off"})


def commit_asynchronously(server: PostgresServer, statement: str) -> None:
    """Commit without waiting for the log to be written."""
    with psycopg.connect(server.dsn(), options="-c synchronous_commit=off", autocommit=True) as connection:
        connection.execute(statement.encode())


def test_a_crash_after_a_chunk_saw_an_asynchronous_commit(
    asynchronous_source: PostgresServer, make_pipeline: Make
) -> None:
    pipeline = make_pipeline(asynchronous_source)
    pipeline.provision()
    commit_asynchronously(asynchronous_source, "INSERT INTO public.t VALUES (100, 'asynchronous', NULL)")
    pipeline.copy()
    asynchronous_source.kill()
    asynchronous_source.start()
    # The chunk has been accepted, so its marker must have made durable what it saw.
    found = "SELECT body FROM public.t WHERE id = 100"
    assert pipeline.target_rows(found) == pipeline.source_rows(found) == [("asynchronous",)]
    pipeline.source("INSERT INTO public.t VALUES (101, 'next', NULL)")
    pipeline.apply()
    pipeline.assert_equal()


def test_a_crash_before_a_chunk_is_sealed(
    asynchronous_source: PostgresServer, make_pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the chunk saw is gone, and its transaction's id goes to another: had it been kept, that would be dropped."""
    pipeline = make_pipeline(asynchronous_source)
    pipeline.provision()
    finish = SnapshotReader.finish

    def crash(reader: SnapshotReader) -> Watermark:
        asynchronous_source.kill()
        return finish(reader)

    chunk = pipeline.chunk(1).chunk
    commit_asynchronously(asynchronous_source, "INSERT INTO public.t VALUES (100, 'phantom', NULL)")
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotReader, "finish", crash)
        assert isinstance(copy_chunk_of(pipeline.pipeline, chunk), StreamFailed)
    assert pipeline.chunk(1).watermark is None
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(0,)]

    asynchronous_source.start()
    assert pipeline.source_rows("SELECT count(*) FROM public.t WHERE id = 100") == [(0,)]
    pipeline.source("INSERT INTO public.t VALUES (101, 'with the id of the phantom', NULL)")
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_equal()


# -- what is not row by row ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ascending", "descending"])
def test_a_truncate_between_two_chunks(make_pipeline: Make, mode: Mode, order: tuple[int, int]) -> None:
    """One chunk's rows are gone, the other's are not: no filter by keys can tell, so the table is read again."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    pipeline.copy(order[0])
    pipeline.source(
        "TRUNCATE public.t",
        "INSERT INTO public.t VALUES (1, 'new', NULL), (11, 'new', NULL), (30, 'new', NULL)",
    )
    pipeline.copy(order[1])
    pipeline.source("UPDATE public.t SET body = 'newer' WHERE id = 11")
    pipeline.apply()
    pipeline.assert_verified()
    # Read again, the table goes on as before; then a truncate that no chunk contains.
    pipeline.source("INSERT INTO public.t VALUES (40, 'after', NULL)")
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("TRUNCATE public.t", "INSERT INTO public.t VALUES (1, 'last', NULL)")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()


@pytest.mark.parametrize("where", [None, "id > 5"])
def test_reading_again_and_again_at_one_place_in_the_log(make_pipeline: Make, where: str | None) -> None:
    """In a changelog the last read must win, although the stream has not moved in between."""
    pipeline = make_pipeline(mode="changelog")
    pipeline.provision()
    pipeline.copy()
    for key in (7, 17):
        pipeline.source(f"DELETE FROM public.t WHERE id = {key}", "UPDATE public.t SET body = body || '+'")
        assert commands.resnapshot(pipeline.pipeline, tables=["public.t"], where=where)["requested"] is None
    pipeline.apply()
    pipeline.assert_verified()


def test_a_rewrite_has_to_wait_for_a_chunk(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.provision()
    rewrite = "ALTER TABLE public.t ALTER body TYPE varchar(100) USING body || '!'"
    reader = SnapshotReader(chunk_task(pipeline.pipeline, pipeline.chunk(0).chunk).read)
    try:
        batches = reader.batches()
        read = next(batches).num_rows
        with (
            psycopg.connect(pipeline.databases.source, options="-c lock_timeout=200ms", autocommit=True) as other,
            pytest.raises(psycopg.errors.LockNotAvailable),
        ):
            other.execute(rewrite)
        read += sum(batch.num_rows for batch in batches)
        assert read == 10
        # Read to its end, it holds nothing any more, even before its marker.
        pipeline.source(rewrite)
    finally:
        reader.close()


def test_a_chunk_has_to_wait_for_a_rewrite(make_pipeline: Make) -> None:
    """A snapshot from before the rewrite's commit would find the table empty."""
    pipeline = make_pipeline()
    pipeline.provision()
    chunk = pipeline.chunk(1).chunk
    dsn = pipeline.databases.source
    with (
        ThreadPoolExecutor(1) as pool,
        transaction(dsn, "ALTER TABLE public.t ALTER body TYPE text USING body || '!'") as rewrite,
    ):
        copied = pool.submit(copy_chunk_of, pipeline.pipeline, chunk)
        await_waiting(dsn, "wait_event_type = 'Lock' AND query LIKE 'LOCK TABLE%'")
        rewrite.commit()
        assert copied.result(SECONDS) == 10
    assert pipeline.target_rows("SELECT body FROM public.t WHERE id = 11") == [("row 11!",)]


def test_rows_that_are_hidden_from_the_reader(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    role = f"reader_{pipeline.name}"
    pipeline.source(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT CREATE ON DATABASE {pipeline.name} TO {role}",
        f"ALTER TABLE public.t OWNER TO {role}",
    )
    try:
        pipeline.change(source={"dsn": pipeline.databases.source.replace("postgres@", f"{role}@")})
        pipeline.provision()
        pipeline.copy(0)
        pipeline.source(
            "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY",
            "ALTER TABLE public.t FORCE ROW LEVEL SECURITY",
            "CREATE POLICY even ON public.t USING (id % 2 = 0)",
        )
        failed = copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk)
        assert isinstance(failed, StreamFailed)
        assert "row-level security" in failed.message
        assert pipeline.chunk(1).watermark is None
        pipeline.source("ALTER TABLE public.t DISABLE ROW LEVEL SECURITY")
        pipeline.copy(1)
        pipeline.apply()
        pipeline.assert_equal()
    finally:
        commands.drop(pipeline.pipeline, takeover=True)
        pipeline.source("ALTER TABLE public.t OWNER TO postgres", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_rows_of_one_copy(make_pipeline: Make, mode: Mode) -> None:
    """They share the LSN of one record, so that only their number tells them apart."""
    pipeline = make_pipeline(mode=mode)
    pipeline.provision()
    pipeline.copy()
    with psycopg.connect(pipeline.databases.source) as connection:
        with connection.cursor().copy("COPY public.t FROM STDIN") as copy:
            for key in range(1000, 0, -1):
                copy.write_row((1000 + key, f"copied {key}", None))
        connection.execute("UPDATE public.t SET body = 'and changed' WHERE id = 1500")
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
        return
    keys = [event[1] for event in events(pipeline)]
    assert keys == [*range(2000, 1000, -1), 1500]
    assert pipeline.target_rows(
        "SELECT count(DISTINCT _commit_lsn), count(DISTINCT _seq) FROM public.t WHERE _op <> 'r'"
    ) == [(1, 1001)]


# -- the slot ------------------------------------------------------------------------------------------


def test_a_busy_table_beside_an_idle_captured_one(make_pipeline: Make) -> None:
    """The log of tables that are not captured is let go of, from one bounded run to the next."""
    pipeline = make_pipeline()
    pipeline.source("CREATE TABLE public.busy (id int, body text)")
    pipeline.provision()
    pipeline.copy()
    retained, written = [], []
    for _ in range(3):
        start = pipeline.marker()
        pipeline.source("INSERT INTO public.busy SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, 8000) n")
        written.append(pipeline.marker() - start)
        # restart_lsn follows at the next record of running transactions, which the server writes by itself in time.
        pipeline.source("SELECT pg_log_standby_snapshot()")
        pipeline.apply()
        retained.append(commands.status(pipeline.pipeline)["slot"]["retained_bytes"])
    assert min(written) > 4 << 20
    assert max(retained) < min(written) / 4, (retained, written)


def test_the_slot_after_a_bounded_run(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    before = commands.status(pipeline.pipeline)["slot"]
    pipeline.source("UPDATE public.t SET body = 'changed'")
    change = pipeline.marker()
    pipeline.apply()
    after = commands.status(pipeline.pipeline)["slot"]
    assert parse_lsn(after["confirmed_flush_lsn"]) >= change
    assert parse_lsn(after["confirmed_flush_lsn"]) <= pipeline.record.applied
    assert parse_lsn(after["restart_lsn"]) >= parse_lsn(before["restart_lsn"])
    pipeline.source("SELECT pg_log_standby_snapshot()")
    pipeline.apply()
    assert parse_lsn(commands.status(pipeline.pipeline)["slot"]["restart_lsn"]) >= change


def test_nothing_is_acknowledged_before_the_first_unit(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    consistent = pipeline.provision().applied
    pipeline.source("UPDATE public.t SET body = 'changed'")
    pipeline.copy()
    assert pipeline.confirmed() <= consistent
    assert pipeline.record.applied == consistent


# -- who may commit ------------------------------------------------------------------------------------


def test_an_old_epoch_commits_nothing(make_pipeline: Make) -> None:
    pipeline = make_pipeline()
    record = pipeline.provision()
    sink = sink_of(pipeline.pipeline)
    pipeline.copy(0)
    task = chunk_task(pipeline.pipeline, pipeline.chunk(1).chunk)
    assert sink.take_epoch("another") > record.epoch
    assert isinstance(copy_chunk(task), Fenced)
    assert pipeline.chunk(1).watermark is None
    with pytest.raises(Fenced):
        sink.commit(record.epoch, record.applied, record.applied + 1, [])
    with pytest.raises(Fenced):
        sink.replace(record.epoch, task.target, None, iter(()), pytest.fail, task.target)
    assert pipeline.record.applied == record.applied
    assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(10,)]
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_equal()


def test_taking_over_waits_for_a_commit_in_flight(make_pipeline: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the old writer's commit comes before the new epoch, and counts, or it does not come at all."""
    pipeline = make_pipeline()
    record = pipeline.provision()
    sink = sink_of(pipeline.pipeline)
    finish = SnapshotReader.finish
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(sink.take_epoch("another")))

    def take_over(reader: SnapshotReader) -> Watermark:
        thread.start()
        await_waiting(pipeline.databases.target, "wait_event_type = 'Lock' AND query LIKE 'UPDATE airflow_cdc.pipe%'")
        return finish(reader)

    monkeypatch.setattr(SnapshotReader, "finish", take_over)
    assert copy_chunk_of(pipeline.pipeline, pipeline.chunk(0).chunk) == 10
    thread.join(SECONDS)
    assert taken == [pipeline.record.epoch]
    assert taken != [record.epoch]
    assert pipeline.chunk(0).watermark is not None
    monkeypatch.setattr(SnapshotReader, "finish", finish)
    assert isinstance(copy_chunk_of(pipeline.pipeline, pipeline.chunk(1).chunk, record.epoch), Fenced)


def test_a_batch_that_another_run_has_planned(make_pipeline: Make) -> None:
    """A run that is taken over plans on, in the checkpoint of both, until it notices; Spark then wants that batch."""
    pipeline = make_pipeline()
    applied = pipeline.provision().applied
    source = pipeline.pipeline.source
    options = SourceOptions(pipeline.databases.pipeline_source, source.slot, source.publication, applied, 1 << 20, 60)
    old, new = SlotStreamReader(options), SlotStreamReader(options)
    start, limit = old.initialOffset(), old.getDefaultReadLimit()
    pipeline.source("UPDATE public.t SET body = 'lost'")
    try:
        assert await_condition(lambda: old.latestOffset(start, limit) != start, SECONDS)
        planned = old.latestOffset(start, limit)
        assert len(old.partitions(start, planned)) == 1
    finally:
        old.stop()
    with pytest.raises(StreamFailed, match="another run"):
        new.partitions(start, planned)


def test_a_chunk_is_committed_once(make_pipeline: Make) -> None:
    """A second attempt beside the first writes nothing: the record keeps the snapshot of the rows that stand there."""
    pipeline = make_pipeline()
    pipeline.provision()
    task = chunk_task(pipeline.pipeline, pipeline.chunk(0).chunk)
    assert copy_chunk(task) == 10
    first = pipeline.chunk(0)
    pipeline.source("UPDATE public.t SET body = 'between' WHERE id = 2")
    assert copy_chunk(task) == 0
    assert pipeline.chunk(0) == first
    pipeline.copy(1)
    pipeline.apply()
    pipeline.assert_equal()


# -- the gate ------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_lost_slot_on_the_command_line(make_pipeline: Make) -> None:
    """Refused by every command that would go on, with exit code 3; ``resnapshot --all`` and a stream repair it."""
    pipeline = make_pipeline()
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source(
        "DELETE FROM public.t WHERE id = 3",
        f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')",
    )
    for command in ("stream", "run"):
        refused = pipeline.json(command, code=3)["error"]
        assert refused["kind"] == "GateClosed"
        assert "resnapshot --all" in refused["solution"]
    assert pipeline.json("status")["slot"] is None
    assert pipeline.json("verify", code=4)["equal"] is False
    assert pipeline.json("resnapshot", "--all")["rows"] == 19
    pipeline.source("INSERT INTO public.t VALUES (3, 'back', NULL)")
    assert pipeline.json("stream", "--until", "caught-up")["caught_up"] is True
    assert pipeline.json("status")["consistent"] is True
    pipeline.assert_equal()
