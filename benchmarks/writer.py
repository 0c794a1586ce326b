"""Writes a steady load of changes."""

from __future__ import annotations

import threading
import time

import psycopg

from benchmarks.lab import ROW
from benchmarks.report import check

_TRANSACTION = 50
_KEYS = 20_000
_CONNECTIONS = 4


class Writer:
    """Inserts, updates and deletes on a bounded number of keys, in transactions of fifty changes, at a steady rate.

    Four connections share the rate, each with its own keys, because commits of a single connection wait for the disk.

    :param rate: changes per second, if the source is fast enough.
    """

    def __init__(self, dsn: str, rate: float) -> None:
        self._dsn = dsn
        self._rate = rate / _CONNECTIONS
        self._halt = threading.Event()
        self._changes = [0] * _CONNECTIONS
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"writer-{i}", daemon=True) for i in range(_CONNECTIONS)
        ]
        self.failure: Exception | None = None

    @property
    def changes(self) -> int:
        """Return the number of changes committed."""
        return sum(self._changes)

    def _run(self, number: int) -> None:
        try:
            self._write(number)
        except Exception as e:
            self.failure = e

    def _write(self, number: int) -> None:
        row = ROW.replace("%", "%%")
        upsert = f"""
            INSERT INTO public.t SELECT {row} FROM generate_series(%s::bigint, %s::bigint) AS n
            ON CONFLICT (id) DO UPDATE SET amount = t.amount + 1, note = md5(t.note), status = excluded.status
        """
        keys = _KEYS // _CONNECTIONS
        began, offset, changes = time.monotonic(), 0, 0
        with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=1) as connection:
            while not self._halt.wait(max(0.0, changes / self._rate - (time.monotonic() - began))):
                first = 1 + number * keys + offset
                with connection.pipeline(), connection.transaction():
                    connection.execute(upsert.encode(), [first, first + _TRANSACTION - 2])
                    connection.execute("DELETE FROM public.t WHERE id = %s", [first])
                changes += _TRANSACTION
                self._changes[number] = changes
                offset = (offset + _TRANSACTION - 1) % (keys - _TRANSACTION)

    def __enter__(self) -> Writer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        for thread in self._threads:
            thread.join()
        check(None, self.failure, "failure of the writer")
