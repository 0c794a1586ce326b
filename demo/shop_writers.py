"""Processes that change a shop at a given pace, as customers and clerks do."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable
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
from demo.shop import STATEMENTS, TOASTED_EVERY, TRANSACTIONS, Transactions


class WritersFailed(CdcError):
    """The writers failed."""


@dataclass(frozen=True)
class _Sizes:
    """The highest numbers in the tables when a writer starts."""

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
    """One connection's share of the work; the seed determines its choices."""

    def __init__(self, connection: psycopg.Connection[Any], sizes: _Sizes, work: _Work, index: int) -> None:
        self._connection = connection
        self._sizes = sizes
        self._transactions = work.transactions
        self._random = random.Random(work.seed * 1000 + index)
        self._label = f"~{work.seed}.{index}"
        # Each writer starts at its own index and counts in steps of the number of writers, so new keys never collide.
        self._new = max(sizes.customers, sizes.orders) + index
        self._step = work.connections

    def transact(self) -> bool:
        """Run one transaction, and return whether it was committed; a conflict may abort it."""
        weights = [weight for weight, _ in self._transactions]
        chosen = self._random.choices(self._transactions, weights)[0][1]
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
        """Return the values of one transaction; each statement uses those that it names."""
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
        """Return the key at which to look for an event; half of the time its body is stored out of line."""
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
        """Return the seconds until the next transaction may start; after a stall, at most one second is made up for."""
        now = time.monotonic()
        self._due = max(self._due + self.interval, now - 1.0)
        return max(0.0, self._due - now)


@dataclass(frozen=True)
class _Work:
    """The work of the writers' process."""

    dsn: str
    rate: float
    connections: int
    seed: int
    transactions: Transactions


def _write(work: _Work, index: int, halt: threading.Event, count: Callable[[], None]) -> None:
    """Run transactions on one connection until halted."""
    with psycopg.connect(
        work.dsn, autocommit=True, application_name="shop writer", client_encoding="UTF8"
    ) as connection:
        writer = _Writer(connection, _Sizes.read(connection), work, index)
        pace = _Pace(work.connections / work.rate)
        while not halt.wait(pace.delay()):
            if writer.transact():
                count()


def _run(work: _Work, committed: Synchronized[int], control: Connection) -> None:
    """Run the writers' process: threads write until ``control`` receives a message or is closed."""
    # An interrupt at the terminal is meant for the parent process, which stops this one.
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
    """Connections that change the shop at a steady rate, in a separate process.

    Use it as a context manager, or ``start`` and ``stop``. As with every spawned
    process, a script that uses it needs the ``if __name__ == "__main__"`` guard.

    :param rate: transactions per second of all connections together.
    :param transactions: what they do, each with its frequency.
    """

    def __init__(
        self,
        dsn: str,
        rate: float = 300.0,
        connections: int = 4,
        seed: int = 1,
        transactions: Transactions = TRANSACTIONS,
    ) -> None:
        work = _Work(dsn, rate, connections, seed, transactions)
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._theirs: Connection | None = theirs
        self._committed: Synchronized[int] = context.Value("Q", 0)
        self._process: SpawnProcess = context.Process(
            target=_run, args=(work, self._committed, theirs), name="shop writers"
        )
        self._process.daemon = True

    @property
    def transactions(self) -> int:
        """Return the number of transactions committed so far."""
        return self._committed.value

    @property
    def running(self) -> bool:
        """Return whether the writers are running."""
        return self._process.is_alive()

    def start(self) -> None:
        """Start writing in the background."""
        self._process.start()
        if self._theirs is not None:
            # Only the process holds the other end, so each side notices when the other one exits.
            self._theirs.close()
            self._theirs = None

    def stop(self) -> None:
        """Stop after the current transactions are committed; raise an error if the writers failed before."""
        with contextlib.suppress(OSError):
            self._control.send("stop")
        self._process.join()
        reports = self._reports()
        if reports or self._process.exitcode != 0:
            raise WritersFailed(
                f"The shop's writers failed after {self.transactions} transactions: "
                f"{'; '.join(reports) or f'exit code {self._process.exitcode}'}.",
                "Check that the source server is running and the shop's tables exist.",
            )

    def _reports(self) -> list[str]:
        """Return the messages that the process sent before it ended."""
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
