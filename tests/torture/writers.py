"""Writers: sessions that keep changing the tables, each with its own random transactions.

The seed and the lane determine the actions of a writer, not the contents of the tables: statements name rows by number,
whether they exist or not. Only the writer of a lane inserts, deletes and moves its rows, so that a row's versions also
grow when it is deleted and returns. Updates apply to all lanes.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg

from tests.support.threads import Stoppable
from tests.torture.schema import FILLERS, LANES, SPACE, TOTAL_ACCOUNTS, Table, wide

_OPTIONS = "-c lock_timeout=3s -c deadlock_timeout=200ms -c TimeZone=UTC -c synchronous_commit={}"
# Errors that another session, the server's end or the nemesis causes; the writer continues with its next transaction.
_EXPECTED = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.UniqueViolation,
    psycopg.errors.ExclusionViolation,
    psycopg.errors.SerializationFailure,
    psycopg.errors.UndefinedColumn,  # another session was faster to rename or drop it
)


# Alters the oldest of the columns that writers have added, if there is one.
_EXTRA = """
DO $$
DECLARE oldest name := (SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass
    AND attname LIKE 'extra%' AND NOT attisdropped ORDER BY attnum LIMIT 1);
BEGIN
    IF oldest IS NOT NULL THEN
        EXECUTE format('ALTER TABLE {table} {what}', oldest);
    END IF;
END $$"""


class Writer(Stoppable):
    """One session.

    :param dsn: URI of the source.
    :param pace: mean seconds between two transactions.
    """

    def __init__(self, dsn: str, seed: int, lane: int, tables: list[Table], pace: float) -> None:
        super().__init__(f"writer {lane}")
        self._dsn = dsn
        self._chance = random.Random(f"{seed}/writer/{lane}")
        self._lane = lane
        self._accounts = [table for table in tables if table.kind == "account"]
        self._tables = [table for table in tables if table.kind != "account"]
        self._pace = pace
        self._number = 0
        self._columns = 0
        self._connection: psycopg.Connection[Any] | None = None
        self._asynchronous = self._chance.random() < 0.4
        self.done = Counter[str]()

    def work(self) -> None:
        try:
            while not self._halt.wait(self._chance.expovariate(1 / self._pace)):
                self._transaction()
        finally:
            self._disconnect()

    def _transaction(self) -> None:
        """Draw a transaction completely, then execute it if the server allows it."""
        self._number += 1
        steps = self._draw()
        end = self._chance.choices(("commit", "rollback", "prepare"), (92, 5, 3))[0]
        long = self._chance.random() < 0.02
        try:
            connection = self._connect()
            with connection.transaction(force_rollback=end == "rollback") if end != "prepare" else _begun(connection):
                for step in steps:
                    step(connection)
                    if long:
                        self._halt.wait(1.0)
                if end == "prepare":
                    connection.execute(f"PREPARE TRANSACTION '{self._gid}'".encode())
            if end == "prepare":
                self._halt.wait(0.2)
                self._resolve_prepared(connection)
            self.done[end] += 1
        except _EXPECTED as e:
            self.done[type(e).__name__] += 1
            if end == "prepare":
                self._disconnect()
        except psycopg.OperationalError:
            self.done["cut off"] += 1
            self._disconnect()

    @property
    def _gid(self) -> str:
        return f"torture {self._lane}"

    def _connect(self) -> psycopg.Connection[Any]:
        """Return the session, reopened if the nemesis has cut it."""
        if self._connection is None:
            options = _OPTIONS.format("off" if self._asynchronous else "on")
            connection = psycopg.connect(self._dsn, autocommit=True, options=options, connect_timeout=10)
            self._resolve_prepared(connection)
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
        self._connection = None

    def _resolve_prepared(self, connection: psycopg.Connection[Any]) -> None:
        query = "SELECT 1 FROM pg_prepared_xacts WHERE gid = %s AND database = current_database()"
        if connection.execute(query, [self._gid]).fetchone():
            connection.execute(f"COMMIT PREPARED '{self._gid}'".encode())

    # -- transactions ------------------------------------------------------------------------------

    def _draw(self) -> list[Callable[[psycopg.Connection[Any]], Any]]:
        steps = [self._statement() for _ in range(self._chance.choice((1, 1, 1, 2, 2, 3, 5)))]
        if self._chance.random() < 0.2:
            inner = [self._statement() for _ in range(2)]
            undone = self._chance.random() < 0.6

            def savepoint(connection: psycopg.Connection[Any]) -> None:
                with connection.transaction(force_rollback=undone):
                    for step in inner:
                        step(connection)

            steps.insert(self._chance.randint(0, len(steps)), savepoint)
        return steps

    def _statement(self) -> Callable[[psycopg.Connection[Any]], Any]:
        """Return one statement, or a few that belong together, with all random choices already drawn."""
        kinds = {
            self._draw_transfer: 25,
            self._draw_insert: 10,
            self._draw_update: 20,
            self._draw_update_many: 5,
            self._draw_update_wide: 6,
            self._draw_delete: 8,
            self._draw_move: 8,
            self._draw_move_many: 2,
            self._draw_swap: 5,
            self._draw_return: 6,
            self._draw_copy: 4,
            self._draw_truncate: 0.4,
            self._draw_add_column: 0.15,
            self._draw_rename_column: 0.1,
            self._draw_drop_column: 0.1,
        }
        kind = self._chance.choices(list(kinds), list(kinds.values()))[0]
        statements = kind(self._chance.choice(self._tables))
        if kind == self._draw_copy:
            return lambda connection: _copy(connection, *statements)

        def execute(connection: psycopg.Connection[Any]) -> None:
            for statement in statements:
                connection.execute(statement.encode())

        return execute

    def _own(self) -> int:
        return self._chance.randrange(SPACE // LANES) * LANES + self._lane

    def _salt(self) -> int:
        return self._number

    def _length(self) -> int:
        return self._chance.choices((0, 100, 400, 20_000), (30, 50, 18, 0.3))[0]

    def _draw_transfer(self, _: Table) -> list[str]:
        (giver, taker), amount = self._chance.sample(self._accounts, 2), self._chance.randint(1, 100)
        rows = [self._chance.randrange(TOTAL_ACCOUNTS) for _ in range(2)]
        return [
            f"UPDATE {giver.label} SET balance = balance - {amount} WHERE n = {rows[0]}",
            f"UPDATE {taker.label} SET balance = balance + {amount} WHERE n = {rows[1]}",
        ]

    def _draw_insert(self, table: Table) -> list[str]:
        rows = sorted({self._own() for _ in range(self._chance.choice((1, 1, 3, 30)))})
        values = table.values("n", self._salt(), self._length())
        return [
            f"INSERT INTO {table.label} ({', '.join(table.columns)}) SELECT {values}"
            f" FROM unnest(ARRAY{rows}) n ON CONFLICT DO NOTHING"
        ]

    def _draw_update(self, table: Table) -> list[str]:
        filler = self._chance.choice(table.fillers)
        value = _filler(filler, self._salt())
        return [f"UPDATE {table.label} SET {filler} = {value} WHERE n = {self._chance.randrange(SPACE)}"]

    def _draw_update_many(self, table: Table) -> list[str]:
        filler, low = self._chance.choice(table.fillers), self._chance.randrange(SPACE)
        value = _filler(filler, self._salt())
        return [f"UPDATE {table.label} SET {filler} = {value} WHERE n BETWEEN {low} AND {low + 60}"]

    def _draw_update_wide(self, table: Table) -> list[str]:
        if not table.wide:
            return self._draw_update(table)
        value = wide("n", self._salt(), self._length())
        return [f"UPDATE {table.label} SET wide = {value} WHERE n = {self._chance.randrange(SPACE)}"]

    def _draw_delete(self, table: Table) -> list[str]:
        return [f"DELETE FROM {table.label} WHERE n = ANY (ARRAY{[self._own() for _ in range(2)]})"]

    def _draw_move(self, table: Table) -> list[str]:
        row, free = self._own(), self._own()
        unless = f"NOT EXISTS (SELECT FROM {table.label} WHERE n = {free})"
        return [f"UPDATE {table.label} SET {table.rekey(str(free))} WHERE n = {row} AND {unless}"]

    def _draw_move_many(self, table: Table) -> list[str]:
        """Move rows far away; the next such transaction moves them back."""
        low = self._chance.randrange(SPACE)
        own = f"n % {LANES} = {self._lane}"
        return [
            f"UPDATE {table.label} t SET {table.rekey(f'n - {SPACE}')} WHERE {own} AND n >= {SPACE}"
            f" AND NOT EXISTS (SELECT FROM {table.label} o WHERE o.n = t.n - {SPACE})",
            f"UPDATE {table.label} SET {table.rekey(f'n + {SPACE}')} WHERE {own} AND n BETWEEN {low} AND {low + 40}"
            f" AND n < {SPACE}",
        ]

    def _draw_swap(self, table: Table) -> list[str]:
        """Swap two keys by way of a third."""
        row, other, third = self._own(), self._own(), 2 * SPACE + self._lane
        moves = ((row, third), (other, row), (third, other))
        return [f"UPDATE {table.label} SET {table.rekey(str(to))} WHERE n = {at}" for at, to in moves if row != other]

    def _draw_return(self, table: Table) -> list[str]:
        row = self._own()
        values = table.values(str(row), self._salt(), self._length())
        return [
            f"DELETE FROM {table.label} WHERE n = {row}",
            f"INSERT INTO {table.label} ({', '.join(table.columns)}) SELECT {values}",
        ]

    def _draw_copy(self, table: Table) -> list[str]:
        """Insert rows with COPY that a query has produced, because the key is a function of SQL."""
        rows = sorted({self._own() for _ in range(12)})
        columns = ", ".join(table.columns)
        return [
            f"COPY (SELECT {table.values('n', self._salt(), 100)} FROM unnest(ARRAY{rows}) n) TO STDOUT",
            f"DELETE FROM {table.label} WHERE n = ANY (ARRAY{rows})",
            f"COPY {table.label} ({columns}) FROM STDIN",
        ]

    def _draw_truncate(self, table: Table) -> list[str]:
        return [f"TRUNCATE {table.label}"]

    def _draw_add_column(self, table: Table) -> list[str]:
        name, low = self._column(), self._chance.randrange(SPACE)
        kind = self._chance.choice(("int DEFAULT 7", "text DEFAULT 'it''s new'", "numeric(8,3)", "int[] DEFAULT '{1}'"))
        rows = f"n BETWEEN {low} AND {low + 20}"
        return [
            f"ALTER TABLE {table.label} ADD COLUMN {name} {kind}",
            *[f"UPDATE {table.label} SET {name} = NULL WHERE {rows}"] * self._chance.randint(0, 1),
        ]

    def _draw_rename_column(self, table: Table) -> list[str]:
        return [_EXTRA.format(table=table.label, what=f"RENAME %I TO {self._column()}")]

    def _draw_drop_column(self, table: Table) -> list[str]:
        return [_EXTRA.format(table=table.label, what="DROP COLUMN %I")]

    def _column(self) -> str:
        """Return a column name that has never existed: a changelog keeps columns that the source has dropped."""
        self._columns += 1
        return f"extra_{self._lane}_{self._columns}"


def _filler(name: str, salt: int) -> str:
    return FILLERS[name][1].format(n="n", salt=salt)


def _copy(connection: psycopg.Connection[Any], query: str, delete: str, into: str) -> None:
    with connection.cursor() as cursor:
        with cursor.copy(query.encode()) as copy:
            data = b"".join(map(bytes, copy))
        cursor.execute(delete.encode())
        with cursor.copy(into.encode()) as copy:
            copy.write(data)


@contextlib.contextmanager
def _begun(connection: psycopg.Connection[Any]) -> Any:
    """Start a transaction that the block ends by preparing it."""
    connection.execute("BEGIN")
    try:
        yield
    except psycopg.Error:
        with contextlib.suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise
