"""A steady load of changes."""

from __future__ import annotations

import threading
import time

import psycopg

from benchmarks.lab import ROW
from benchmarks.report import check

_TRANSACTION = 50
_KEYS = 20_000


class Writer(threading.Thread):
    """Inserts, updates and deletes on a bounded number of keys, in transactions of fifty, at a steady rate.

    :param rate: changes a second, if the source can.
    :ivar changes: that have been committed.
    """

    def __init__(self, dsn: str, rate: float) -> None:
        super().__init__(name="writer", daemon=True)
        self._dsn = dsn
        self._rate = rate
        self._halt = threading.Event()
        self.changes = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
        except Exception as e:
            self.failure = e

    def _write(self) -> None:
        row = ROW.replace("%", "%%")
        upsert = f"""
            INSERT INTO public.t SELECT {row} FROM generate_series(%s::bigint, %s::bigint) AS n
            ON CONFLICT (id) DO UPDATE SET amount = t.amount + 1, note = md5(t.note), status = excluded.status
        """
        began, first = time.monotonic(), 1
        with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=1) as connection:
            while not self._halt.wait(max(0.0, self.changes / self._rate - (time.monotonic() - began))):
                with connection.pipeline(), connection.transaction():
                    connection.execute(upsert.encode(), [first, first + _TRANSACTION - 2])
                    connection.execute("DELETE FROM public.t WHERE id = %s", [first])
                self.changes += _TRANSACTION
                first = 1 + (first + _TRANSACTION - 1) % _KEYS

    def __enter__(self) -> Writer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self.join()
        check(None, self.failure, "failure of the writer")
