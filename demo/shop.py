"""The demo's source: a shop whose tables hold what is hard about change data capture.

Four tables with four kinds of keys (bigint, uuid, composite, text), values that
are awkward as text (numeric, timestamptz, jsonb, arrays, quotes, NULLs) and
bodies that Postgres stores out of line (TOAST), so that updates do not send
them. :func:`load` fills them on the server; :class:`Writers` changes them, as
customers would, for as long as a snapshot and a stream are at work.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import errors

from airflow_cdc_provider.engine.core.errors import CdcError

TABLES = ("customers", "orders", "order_lines", "events")
TABLE_NAMES = tuple(f"shop.{table}" for table in TABLES)

# Rows at scale 1: a million together.
CUSTOMERS, ORDERS, LINES_PER_ORDER, EVENTS = 100_000, 250_000, 2, 150_000

# Every so many events one has a body that is stored out of line.
TOASTED_EVERY = 50

SCHEMA = """
CREATE SCHEMA IF NOT EXISTS shop;
CREATE TABLE IF NOT EXISTS shop.customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    email text,
    balance numeric NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL,
    profile jsonb,
    tags text[]
);
CREATE TABLE IF NOT EXISTS shop.orders (
    id uuid PRIMARY KEY,
    order_no bigint NOT NULL,
    customer_id bigint NOT NULL,
    total numeric(12, 2) NOT NULL,
    created_at timestamptz NOT NULL,
    status text NOT NULL,
    details jsonb
);
CREATE TABLE IF NOT EXISTS shop.order_lines (
    order_no bigint,
    line_no int,
    price numeric NOT NULL,
    article text NOT NULL,
    discounts int[],
    PRIMARY KEY (order_no, line_no)
);
CREATE TABLE IF NOT EXISTS shop.events (
    id text PRIMARY KEY,
    payload jsonb NOT NULL,
    at timestamptz NOT NULL,
    body text
);
"""

# Values follow from the row's number, so that every load gives the same rows.
LOADS = (
    """
    INSERT INTO shop.customers
    SELECT n, CASE n % 4 WHEN 0 THEN 'Zoë ' WHEN 1 THEN 'O''Brien ' WHEN 2 THEN 'Łukasz "L" ' ELSE '\\N ' END || n,
        CASE WHEN n % 10 > 0 THEN 'customer' || n || '@example.com' END,
        (n * 7919 % 1000003)::numeric / 100, timestamptz '2024-01-01 00:00+00' + n * interval '61.5 seconds',
        CASE WHEN n % 7 > 0 THEN jsonb_build_object('city', 'City ' || n % 500, 'newsletter', n % 2 = 0) END,
        CASE n % 3 WHEN 0 THEN '{{}}' WHEN 1 THEN ARRAY['a,b', NULL, 'tag ' || n % 20] END
    FROM generate_series(1, {customers}::bigint) AS n
    """,
    """
    INSERT INTO shop.orders
    SELECT md5('order' || n)::uuid, n, 1 + n * 31 % {customers}, (n * 104729 % 100000000)::numeric / 100,
        timestamptz '2025-01-01 00:00+00' + n * interval '37.123456 seconds',
        (ARRAY['new', 'paid', 'sent', 'done'])[1 + n % 4],
        CASE WHEN n % 5 > 0 THEN jsonb_build_object('channel', n % 3, 'coupon', NULL) END
    FROM generate_series(1, {orders}::bigint) AS n
    """,
    """
    INSERT INTO shop.order_lines
    SELECT n, line, (n * 1299709 % 1000003)::numeric / 1000 + line, 'article ' || n * line % 5000,
        CASE WHEN n % 6 = 0 THEN ARRAY[5, NULL, (n % 50)::int] WHEN n % 6 = 1 THEN '{{}}' END
    FROM generate_series(1, {orders}::bigint) AS n, generate_series(1, {lines_per_order}) AS line
    """,
    """
    INSERT INTO shop.events
    SELECT 'event-' || lpad(n::text, 9, '0'), jsonb_build_object('kind', n % 12, 'article', n % 5000),
        timestamptz '2026-01-01 00:00+00' + n * interval '11 seconds',
        CASE WHEN n % {toasted_every} = 0
            THEN (SELECT string_agg(md5(n || '.' || i), '') FROM generate_series(1, 260 + n % 40) AS i)
            WHEN n % 9 > 0 THEN 'seen ' || md5(n::text) END
    FROM generate_series(1, {events}::bigint) AS n
    """,
)


class WritersFailed(CdcError):
    """The writers could not go on."""


def create_schema(connection: psycopg.Connection[Any]) -> None:
    """Create the shop's empty tables where they do not exist, and commit."""
    connection.execute(SCHEMA)
    connection.commit()


def load(dsn: str, scale: float = 1.0) -> int:
    """Fill the empty tables, two at a time on the server; the number of rows."""
    sizes = {
        "customers": max(1, round(CUSTOMERS * scale)),
        "orders": max(1, round(ORDERS * scale)),
        "lines_per_order": LINES_PER_ORDER,
        "events": max(1, round(EVENTS * scale)),
        "toasted_every": TOASTED_EVERY,
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        # The longest first, so that both connections end at about the same time.
        loads = pool.map(lambda statement: _execute(dsn, statement.format(**sizes)), reversed(LOADS))
        rows = sum(loads)
    _execute(dsn, "ANALYZE " + ", ".join(TABLE_NAMES))
    return rows


def _execute(dsn: str, statement: str) -> int:
    with psycopg.connect(dsn, autocommit=True, client_encoding="UTF8") as connection:
        return connection.execute(statement).rowcount


BIG_BODY = "(SELECT string_agg(md5(%(seed)s || i::text), '') FROM generate_series(1, 270) AS i)"
SOME_EVENT = "(SELECT id FROM shop.events WHERE id >= %(event)s ORDER BY id LIMIT 1)"

STATEMENTS: Mapping[str, str] = {
    "insert order": """
        INSERT INTO shop.orders VALUES (md5('order' || %(new)s::text)::uuid, %(new)s, %(customer)s, %(amount)s,
            clock_timestamp(), 'new', %(document)s)""",
    "insert line": """
        INSERT INTO shop.order_lines VALUES (%(new)s, %(line)s, %(amount)s, 'article ' || %(number)s::text,
            ARRAY[%(line)s::int, NULL])""",
    "charge": "UPDATE shop.customers SET balance = balance - %(amount)s WHERE id = %(customer)s",
    "edit profile": """
        UPDATE shop.customers SET profile = profile || %(document)s, tags = tags || %(text)s::text
        WHERE id = %(customer)s""",
    "advance order": """
        UPDATE shop.orders SET status = CASE status WHEN 'new' THEN 'paid' WHEN 'paid' THEN 'sent' ELSE 'done' END,
            total = total + 0.01 WHERE id = md5('order' || %(order)s::text)::uuid""",
    "insert event": """
        INSERT INTO shop.events VALUES ('event-' || lpad(%(number)s::text, 9, '0') || %(suffix)s, %(document)s,
            clock_timestamp(), %(text)s)""",
    "insert big event": f"""
        INSERT INTO shop.events VALUES ('event-' || lpad(%(number)s::text, 9, '0') || %(suffix)s, %(document)s,
            clock_timestamp(), {BIG_BODY})""",
    "touch event": f"UPDATE shop.events SET payload = payload || %(document)s WHERE id = {SOME_EVENT}",
    "rewrite event": f"UPDATE shop.events SET body = {BIG_BODY} WHERE id = {SOME_EVENT}",
    "rename event": f"UPDATE shop.events SET id = split_part(id, '~', 1) || %(suffix)s WHERE id = {SOME_EVENT}",
    "rename customer": "UPDATE shop.customers SET id = %(new)s WHERE id = %(customer)s",
    "renumber lines": "UPDATE shop.order_lines SET line_no = line_no + 100 WHERE order_no = %(order)s",
    "move lines": "UPDATE shop.order_lines SET order_no = %(new)s WHERE order_no = %(order)s",
    "delete order": "DELETE FROM shop.orders WHERE id = md5('order' || %(order)s::text)::uuid",
    "delete lines": "DELETE FROM shop.order_lines WHERE order_no = %(order)s",
    "delete event": f"DELETE FROM shop.events WHERE id = {SOME_EVENT}",
    "delete customer": "DELETE FROM shop.customers WHERE id = %(customer)s",
    "return customer": """
        INSERT INTO shop.customers VALUES (%(customer)s, %(text)s, NULL, %(amount)s, clock_timestamp(), %(document)s,
            '{}')""",
    "savepoint": "SAVEPOINT doubt",
    "roll back": "ROLLBACK TO SAVEPOINT doubt",
}

# What customers and staff do, as statements of one transaction, and how often among a hundred.
TRANSACTIONS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (14, ("insert order", "insert line", "charge")),
    (12, ("insert order", "insert line", "next line", "insert line", "charge", "edit profile")),
    (12, ("edit profile",)),
    (14, ("advance order",)),
    (8, ("insert event",)),
    (3, ("insert big event", "touch event")),
    (12, ("touch event",)),
    (2, ("rewrite event", "touch event")),
    (5, ("rename event",)),
    (2, ("touch event", "rename event", "next event", "rename event")),
    (2, ("rename customer",)),
    (3, ("renumber lines",)),
    (2, ("move lines", "advance order")),
    (3, ("delete order", "delete lines")),
    (2, ("delete event",)),
    (1, ("delete customer", "return customer")),
    (2, ("insert order", "savepoint", "insert line", "charge", "roll back", "insert line")),
    (1, ("advance order", "savepoint", "rename event", "roll back", "edit profile")),
)


@dataclass(frozen=True)
class _Sizes:
    """The highest numbers in the tables when a writer begins."""

    customers: int
    orders: int
    events: int

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> _Sizes:
        row = connection.execute(
            "SELECT coalesce(max(id), 1), (SELECT coalesce(max(order_no), 1) FROM shop.orders),"
            " (SELECT coalesce(max(substr(id, 7, 9)::bigint), 1) FROM shop.events) FROM shop.customers"
        ).fetchone()
        assert row is not None
        return cls(*row)


class _Writer:
    """One connection's share of the work; its choices follow from the seed."""

    def __init__(self, connection: psycopg.Connection[Any], sizes: _Sizes, seed: int, index: int, writers: int) -> None:
        self._connection = connection
        self._sizes = sizes
        self._random = random.Random(seed * 1000 + index)
        self._label = f"~{seed}.{index}"
        # Writers count in steps of their number, each from a start of its own, so new keys never meet.
        self._new = max(sizes.customers, sizes.orders) + index
        self._step = writers

    def transact(self) -> bool:
        """Run one transaction; whether it was committed rather than lost to a conflict."""
        chosen = self._random.choices(TRANSACTIONS, weights=[weight for weight, _ in TRANSACTIONS])[0][1]
        values = self._draw()
        try:
            with self._connection.transaction():
                for step in chosen:
                    self._perform(step, values)
        except (errors.UniqueViolation, errors.DeadlockDetected, errors.SerializationFailure):
            return False
        return True

    def _perform(self, step: str, values: dict[str, Any]) -> None:
        if step == "next line":
            values["line"] += 1
        elif step == "next event":
            values["event"] = self._event()
        else:
            self._connection.execute(STATEMENTS[step], values)

    def _draw(self) -> dict[str, Any]:
        """The values of one transaction; statements take what they name."""
        self._new += self._step
        draw = self._random
        number = draw.randint(1, self._sizes.events)
        return {
            "new": self._new,
            "line": 1,
            "customer": draw.randint(1, self._sizes.customers),
            "order": draw.randint(1, max(self._sizes.orders, self._new)),
            "event": self._event(),
            "number": number,
            "suffix": f"{self._label}.{self._new}",
            "seed": f"{self._label}.{self._new}",
            "amount": draw.randint(1, 99_999) / 100,
            "text": draw.choice(["", "plain", "it's", 'say "hi"', "back\\slash", "a\tb\nc", "\\N", "łódź 🚲", "{,}"]),
            "document": json.dumps({"writer": self._label, "n": number, "note": draw.choice([None, "ü", '"'])}),
        }

    def _event(self) -> str:
        """Where to look for an event: half of the time at one whose body is stored out of line."""
        number = self._random.randint(1, self._sizes.events)
        if self._random.random() < 0.5:
            number -= number % TOASTED_EVERY
        return f"event-{number:09}"


@dataclass
class _Pace:
    """Spreads transactions evenly over time."""

    interval: float
    _due: float = field(default_factory=time.monotonic)

    def delay(self) -> float:
        """Seconds until the next may begin; a stall of more than a second is not made up for."""
        now = time.monotonic()
        self._due = max(self._due + self.interval, now - 1.0)
        return max(0.0, self._due - now)


@dataclass(frozen=True)
class _Work:
    """What the writers' process is told."""

    dsn: str
    rate: float
    connections: int
    seed: int


def _write(work: _Work, index: int, halt: threading.Event, count: Callable[[], None]) -> None:
    """One connection's loop, until halted."""
    with psycopg.connect(
        work.dsn, autocommit=True, application_name="shop writer", client_encoding="UTF8"
    ) as connection:
        writer = _Writer(connection, _Sizes.read(connection), work.seed, index, work.connections)
        pace = _Pace(work.connections / work.rate)
        while not halt.wait(pace.delay()):
            if writer.transact():
                count()


def _run(work: _Work, committed: Synchronized[int], control: Connection) -> None:
    """The writers' process: threads write until the other end of ``control`` speaks or is gone."""
    # An interrupt at the terminal is for our owner, who stops us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    halt = threading.Event()

    def count() -> None:
        with committed.get_lock():
            committed.value += 1

    def write(index: int) -> None:
        try:
            _write(work, index, halt, count)
        except psycopg.Error as error:
            halt.set()
            with contextlib.suppress(OSError):
                control.send(" ".join(f"{type(error).__name__}: {error}".split()).rstrip("."))
        except BaseException:
            halt.set()
            raise

    with ThreadPoolExecutor(max_workers=work.connections) as pool:
        writing = [pool.submit(write, index) for index in range(work.connections)]
        while not halt.is_set():
            if wait([control], timeout=0.2):
                halt.set()
        for each in writing:
            each.result()


class Writers:
    """Connections that change the shop at a steady rate, in a process of their own.

    Use it as a context manager, or ``start`` and ``stop``. As with every spawned
    process, a script that uses it needs the ``if __name__ == "__main__"`` guard.

    :param rate: transactions a second of all connections together.
    """

    def __init__(self, dsn: str, rate: float = 300.0, connections: int = 4, seed: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._theirs: Connection | None = theirs
        self._committed: Synchronized[int] = context.Value("Q", 0)
        self._process: SpawnProcess = context.Process(
            target=_run, args=(_Work(dsn, rate, connections, seed), self._committed, theirs), name="shop writers"
        )
        self._process.daemon = True

    @property
    def transactions(self) -> int:
        """How many transactions were committed so far."""
        return self._committed.value

    @property
    def running(self) -> bool:
        """Whether the writers are at work."""
        return self._process.is_alive()

    def start(self) -> None:
        """Begin to write; returns at once."""
        self._process.start()
        if self._theirs is not None:
            # The process holds the other end alone, so that each sees the other's end.
            self._theirs.close()
            self._theirs = None

    def stop(self) -> None:
        """End after the transactions under way have been committed; raises what stopped the writers before."""
        with contextlib.suppress(OSError):
            self._control.send("stop")
        self._process.join()
        reports = self._reports()
        if reports or self._process.exitcode != 0:
            raise WritersFailed(
                f"The shop's writers stopped after {self.transactions} transactions: "
                f"{'; '.join(reports) or f'exit code {self._process.exitcode}'}.",
                "Check that the source server is running and the shop's tables exist.",
            )

    def _reports(self) -> list[str]:
        """What the process sent before it ended."""
        reports = []
        with contextlib.suppress(EOFError, OSError):
            while self._control.poll():
                reports.append(str(self._control.recv()))
        return sorted(set(reports))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failure of the writers must not hide the error that ends the block.
        with contextlib.suppress(*(() if kind is None else (WritersFailed,))):
            self.stop()
