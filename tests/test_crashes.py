"""Commands that are killed in the middle of their work, with writers going on, and started again.

A kill takes the driver, its JVM and the Python workers at once. Failpoints choose the places: a worker that has
committed its chunk and cannot say so, a driver between staging and commit, between the sink's commit and Spark's, a
slot reader that is about to acknowledge. Whatever was finished must stay, whatever was not must be done, and nothing
twice: in a mirror values are compared, in a changelog every change is counted against an audit trail that triggers
write on the source.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_cdc_provider.demo import shop
from tests.conftest import Databases
from tests.pipelines import Command, PipelineUnderTest

BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"
AUDITED = f"""
CREATE TABLE public.t (id int PRIMARY KEY, body text, big text);
INSERT INTO public.t SELECT n, 'row ' || n, CASE WHEN n % 10 = 0 THEN {BIG.format("n")} END
FROM generate_series(1, 2000) n;
CREATE TABLE public.audit (n bigserial PRIMARY KEY, xid xid8 NOT NULL, op text NOT NULL, old_id int, new_id int);
CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.audit (xid, op, old_id, new_id)
    VALUES (pg_current_xact_id(), lower(left(TG_OP, 1)), OLD.id, NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON public.t FOR EACH ROW EXECUTE FUNCTION public.audit();
"""
STATEMENTS = (
    "INSERT INTO public.t VALUES (%(new)s, 'inserted', NULL)",
    f"INSERT INTO public.t VALUES (%(new)s, 'inserted big', {BIG.format('%(new)s')})",
    "UPDATE public.t SET body = body || '+' WHERE id = %(id)s",
    "UPDATE public.t SET body = body || '*' WHERE id %% 10 = 0 AND id >= %(id)s AND id < %(id)s + 20",
    "UPDATE public.t SET id = %(new)s WHERE id = %(id)s",
    "UPDATE public.t SET id = %(free)s WHERE id = %(id)s AND NOT EXISTS (SELECT FROM public.t WHERE id = %(free)s)",
    "DELETE FROM public.t WHERE id = %(id)s",
)


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Any]:
    """Makes a pipeline of the test's databases; what a failed test leaves running is killed."""
    made: list[PipelineUnderTest] = []

    def make(tables: list[str], **sections: Any) -> PipelineUnderTest:
        made.append(PipelineUnderTest(tmp_path, databases, tables, **sections))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.end_commands()


class Writer(threading.Thread):
    """A session that changes ``public.t`` all the time, in transactions of one to four statements.

    :param lane: of the keys that it gives to new rows, so that two writers never want the same.
    """

    def __init__(self, dsn: str, lane: int) -> None:
        super().__init__(name=f"writer {lane}", daemon=True)
        self._dsn = dsn
        self._random = random.Random(lane)
        self._lane = lane
        self._halt = threading.Event()
        self.transactions = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        new = 10_000 + self._lane
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self._halt.wait(self._random.uniform(0.0, 0.03)):
                    with contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                        with connection.transaction(force_rollback=self._random.random() < 0.05):
                            for _ in range(self._random.randint(1, 4)):
                                new += 2
                                key, free = self._random.randint(1, 2200), self._random.randint(1, 2200)
                                values = {"new": new, "id": key, "free": free}
                                connection.execute(self._random.choice(STATEMENTS), values)
                        self.transactions += 1
        except Exception as e:
            self.failure = e

    def stop(self) -> None:
        """End after the transaction at hand; raise what has ended it before."""
        self._halt.set()
        self.join()
        if self.failure is not None:
            raise self.failure


@contextlib.contextmanager
def writing(dsn: str) -> Iterator[list[Writer]]:
    """Two writers at work, whose transactions overlap."""
    writers = [Writer(dsn, lane) for lane in range(2)]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop()


def kill_when_paused(command: Command, count: int) -> None:
    """Kill a command when a failpoint has stopped as many of its processes."""
    command.until(lambda: command.paused() >= count, f"the failpoint in {count} processes")
    command.kill()


def await_own_death(command: Command) -> None:
    """Wait until the driver has killed itself at a failpoint, then kill what is left of it."""
    assert command.wait().code == -9, command.output()
    command.kill()


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_mirror(make_pipeline: Any) -> None:
    pipeline: PipelineUnderTest = make_pipeline(["shop.*"], snapshot={"chunk_rows": 600})
    source = pipeline.databases.source
    with psycopg.connect(source, autocommit=True) as connection:
        shop.create_schema(connection)
    shop.load(source, scale=0.01)
    with shop.Writers(source, rate=60, connections=2) as writers:
        # Killed in the snapshot: both tasks have committed their first chunk, and the driver never hears of it.
        kill_when_paused(pipeline.start("run", failpoint="after-chunk-commit:pause"), 2)
        first = pipeline.finished_chunks()
        assert len(first) == 2
        assert len(pipeline.record.unfinished) > 10

        # Killed in the stream, with a unit staged and not committed. The snapshot has gone on where it was.
        kill_when_paused(pipeline.start("run", failpoint="after-batch-staged:pause"), 1)
        second = pipeline.finished_chunks()
        assert not pipeline.record.unfinished
        assert {key: second[key] for key in first} == first
        assert {epoch for key, (_, epoch, *_) in second.items() if key not in first} == {2}
        before = pipeline.record.applied
        assert staging_tables(pipeline)

        # Killed with a unit committed in the sink and not in Spark's checkpoint: it is streamed again, and skipped.
        await_own_death(pipeline.start("run", failpoint="after-batch-commit:kill"))
        assert pipeline.finished_chunks() == second
        assert pipeline.record.applied > before
        assert pipeline.confirmed() <= before

        stream = pipeline.start("stream")
        pipeline.await_applied(stream)
        assert pipeline.record.applied >= pipeline.record.high
        live = pipeline.json("verify")
        assert live["live"] is True

        # A damaged row is found while everything moves.
        (key,) = pipeline.source_rows("SELECT order_no FROM shop.order_lines WHERE line_no = 2 ORDER BY 1 LIMIT 1")[0]
        pipeline.source(f"INSERT INTO shop.order_lines VALUES ({key}, 77, 1, 'to be damaged')")
        pipeline.await_applied(stream)
        pipeline.target("UPDATE shop.order_lines SET article = 'damaged' WHERE line_no = 77")
        damage = {"kind": "different", "key": {"order_no": str(key), "line_no": "77"}}
        assert differences(pipeline.json("verify", code=4)) == [damage]
        assert stream.running
        assert writers.transactions > 0

    pipeline.await_applied(stream)
    pipeline.run("stop")
    assert stream.wait().code == 0, stream.output()
    idle = pipeline.json("verify", code=4)
    assert idle["live"] is False
    assert differences(idle) == [damage]
    assert f'"{key}"' in pipeline.run("verify", code=4).stdout
    pipeline.target("UPDATE shop.order_lines SET article = 'to be damaged' WHERE line_no = 77")
    assert pipeline.json("verify")["equal"] is True
    assert pipeline.finished_chunks() == second
    assert staging_tables(pipeline) == []


def differences(verified: dict[str, Any]) -> list[dict[str, Any]]:
    """The differences of all tables."""
    return [difference for table in verified["tables"] for difference in table["differences"]]


def staging_tables(pipeline: PipelineUnderTest) -> list[str]:
    """What is staged in the sink."""
    found = pipeline.target_rows("SELECT tablename FROM pg_tables WHERE schemaname = 'airflow_cdc' ORDER BY 1")
    return [name for (name,) in found if name.startswith("stage_")]


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_changelog(make_pipeline: Any) -> None:
    pipeline: PipelineUnderTest = make_pipeline(["public.t"], sink={"mode": "changelog"}, snapshot={"chunk_rows": 250})
    pipeline.source(AUDITED)
    with writing(pipeline.databases.source) as writers:
        # A worker dies with a chunk written and not committed: the command fails in good order, and no chunk counts.
        failed = pipeline.run("run", "--json", code=1, failpoint="before-chunk-commit:kill")
        assert failed.json["error"]["kind"] == "StreamFailed"
        assert pipeline.finished_chunks() == {}
        assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(0,)]

        kill_when_paused(pipeline.start("run", failpoint="after-chunk-commit:pause"), 2)
        first = pipeline.finished_chunks()
        assert len(first) == 2

        # The commit of a stream unit is under way, and is rolled back.
        await_own_death(pipeline.start("run", failpoint="in-batch-commit:kill"))
        second = pipeline.finished_chunks()
        assert {key: second[key] for key in first} == first
        assert not pipeline.record.unfinished
        assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE _op <> 'r'") == [(0,)]

        # The unit is committed, and Spark does not know.
        await_own_death(pipeline.start("run", failpoint="before-spark-commit:kill"))
        applied = pipeline.record.applied
        assert pipeline.confirmed() < applied

        # The slot's reader dies before it acknowledges; the driver notices.
        failed = pipeline.run("run", "--json", code=1, failpoint="before-acknowledgement:kill")
        assert failed.json["error"]["kind"] == "StreamFailed"
        assert pipeline.confirmed() < pipeline.record.applied
        assert pipeline.record.applied > applied

    pipeline.run("run")
    assert all(writer.transactions > 100 for writer in writers)
    assert pipeline.finished_chunks() == second
    assert staging_tables(pipeline) == []
    assert_exactly_once(pipeline)
    assert pipeline.json("verify")["equal"] is True


def assert_exactly_once(pipeline: PipelineUnderTest) -> None:
    """Snapshot rows stand once a key, changes once each: those that the chunk of their key does not contain.

    Which these are is told by the audit trail, and by Postgres's own function for the visibility in a snapshot.
    """
    repeated = "SELECT _commit_lsn, _seq, _xid FROM public.t WHERE _op <> 'r' GROUP BY 1, 2, 3 HAVING count(*) > 1"
    assert pipeline.target_rows(repeated) == []
    assert pipeline.target_rows("SELECT id FROM public.t WHERE _op = 'r' GROUP BY 1 HAVING count(*) > 1") == []
    copied = sum(chunk.rows for chunk in pipeline.record.chunks)
    assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE _op = 'r'") == [(copied,)]

    chunks = ", ".join(
        f"({c.chunk.lower[0] if c.chunk.lower else 'NULL'}::int, {c.chunk.upper[0] if c.chunk.upper else 'NULL'}::int,"
        f" '{c.watermark.snapshot}'::pg_snapshot)"
        for c in pipeline.record.chunks
        if c.watermark is not None
    )
    half = (
        "EXISTS (SELECT FROM chunk WHERE {0} >= coalesce(lower, {0}) AND (upper IS NULL OR {0} < upper)"
        " AND NOT pg_visible_in_snapshot(xid, snapshot))"
    )
    expected = pipeline.source_rows(
        f"WITH chunk (lower, upper, snapshot) AS (VALUES {chunks}), halves AS ("
        f" SELECT *, {half.format('old_id')} AS erased, {half.format('new_id')} AS written FROM public.audit)"
        " SELECT xid::text::bigint,"
        " CASE WHEN op <> 'u' OR erased AND written THEN op WHEN erased THEN 'd' ELSE 'i' END,"
        " CASE WHEN written THEN new_id ELSE old_id END FROM halves WHERE erased OR written"
    )
    found = pipeline.target_rows("SELECT _xid, _op::text, id FROM public.t WHERE _op <> 'r'")
    assert len(expected) > 100
    lost, surplus = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    assert (lost, surplus) == (Counter(), Counter())
