"""A table under change, and an audit trail of every change: the ground truth for exactly once."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.threads import Stoppable

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


LONG_PAUSE = 0.04
"""Seconds, for tests of many runs: they take long on a busy machine, and all that is written meanwhile is read."""


class Writer(Stoppable):
    """A session that keeps changing ``public.t``, in transactions of one to four statements.

    :param lane: which of the new keys it uses, so that two writers never use the same one.
    :param pause: maximum seconds between two transactions, and before a commit.
    """

    def __init__(self, dsn: str, lane: int, pause: float = 0.03) -> None:
        super().__init__(f"writer {lane}")
        self._pause = pause
        self._dsn = dsn
        self._random = random.Random(lane)
        self._lane = lane
        self.transactions = 0

    def work(self) -> None:
        new = 10_000 + self._lane
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._halt.wait(self._random.uniform(0.0, self._pause)):
                with contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                    with connection.transaction(force_rollback=self._random.random() < 0.05):
                        for _ in range(self._random.randint(1, 4)):
                            new += 2
                            key, free = self._random.randint(1, 2200), self._random.randint(1, 2200)
                            values = {"new": new, "id": key, "free": free}
                            connection.execute(self._random.choice(STATEMENTS), values)
                        self._halt.wait(self._random.uniform(0.0, self._pause))
                    self.transactions += 1


@contextlib.contextmanager
def writing(dsn: str, pause: float = 0.03) -> Iterator[list[Writer]]:
    """Run two writers whose transactions overlap.

    :param pause: see :class:`Writer`.
    """
    writers = [Writer(dsn, lane, pause) for lane in range(2)]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop()


def await_transactions(writers: Sequence[Writer], count: int) -> None:
    """Wait until writers have committed a number of further transactions."""

    def committed() -> int:
        return sum(writer.transactions for writer in writers)

    before = committed()
    assert await_condition(lambda: committed() >= before + count, SECONDS)


def assert_exactly_once(pipeline: PipelineUnderTest, table: str = "public.t", least: int = 100) -> None:
    """Check that each snapshot row occurs once, and each change that the chunk of its key does not contain.

    The audit trail gives these changes, with Postgres's function for visibility in a snapshot.

    :param table: the changelog of ``public.t``.
    :param least: minimum number of changes, so that the check cannot pass without any.
    """
    repeated = f"SELECT _commit_lsn, _seq, _xid FROM {table} WHERE _op <> 'r' GROUP BY 1, 2, 3 HAVING count(*) > 1"
    assert pipeline.target_rows(repeated) == []
    assert pipeline.target_rows(f"SELECT id FROM {table} WHERE _op = 'r' GROUP BY 1 HAVING count(*) > 1") == []
    copied = sum(chunk.rows for chunk in pipeline.record.chunks)
    assert pipeline.target_rows(f"SELECT count(*) FROM {table} WHERE _op = 'r'") == [(copied,)]

    found = pipeline.target_rows(f"SELECT _xid, concat(_op, ''), id FROM {table} WHERE _op <> 'r'")
    assert_all_changes(pipeline, found, least)


def assert_all_changes(
    pipeline: PipelineUnderTest,
    found: Sequence[tuple[int, str, int]],
    least: int = 100,
    moves_are_two: bool = False,
) -> None:
    """Check that a changelog of ``public.t`` has exactly the changes that none of its chunks contains.

    :param found: transaction, kind and key of each change.
    :param moves_are_two: whether a row that changes its key counts as a deletion and an insertion.
    """
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
    moved = "op = 'u' AND erased AND written AND old_id <> new_id" if moves_are_two else "false"
    expected = pipeline.source_rows(
        f"WITH chunk (lower, upper, snapshot) AS (VALUES {chunks}), halves AS ("
        f" SELECT *, {half.format('old_id')} AS erased, {half.format('new_id')} AS written FROM public.audit)"
        " SELECT xid::text::bigint,"
        f" CASE WHEN {moved} THEN 'i' WHEN op <> 'u' OR erased AND written THEN op WHEN erased THEN 'd' ELSE 'i' END,"
        " CASE WHEN written THEN new_id ELSE old_id END FROM halves WHERE erased OR written"
        f" UNION ALL SELECT xid::text::bigint, 'd', old_id FROM halves WHERE {moved}"
    )
    assert len(expected) >= least
    lost, surplus = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    assert (lost, surplus) == (Counter(), Counter())
