"""A reader of the target and of the slot, which looks all the time and reports violations at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from airflow_cdc_provider.engine.core.lsn import parse_lsn
from tests.support.threads import Stoppable
from tests.torture.checks import Versions, acknowledged_early
from tests.torture.history import Sight
from tests.torture.schema import Table
from tests.torture.views import compare_views

_SECONDS = 0.25
_OPTIONS = "-c TimeZone=UTC -c statement_timeout=60s"

_RECORD = """
SELECT p.applied_lsn::text,
       NOT EXISTS (SELECT FROM airflow_cdc.chunks c WHERE c.pipeline = p.pipeline AND c.snapshot IS NULL)
       AND p.applied_lsn >= ALL (SELECT c.high_lsn FROM airflow_cdc.chunks c WHERE c.pipeline = p.pipeline),
       (SELECT count(*) FROM airflow_cdc.chunks c WHERE c.pipeline = p.pipeline AND c.snapshot IS NOT NULL),
       greatest(p.applied_lsn,
           (SELECT max(c.high_lsn) FROM airflow_cdc.chunks c WHERE c.pipeline = p.pipeline))::text,
       (p.source ->> 'timeline')::int
FROM airflow_cdc.pipelines p WHERE p.pipeline = %s
"""


class Observer(Stoppable):
    """Looks a few times a second, until stopped.

    :param slot: name of the slot and, by default, the pipeline.
    :param starting_over: set while the slot may be newer than the sink's record, and therefore ahead of it.
    :param left: returns where the log of each earlier timeline was left.
    """

    def __init__(
        self,
        source: str,
        target: str,
        pipeline: str,
        slot: str,
        mode: str,
        tables: list[Table],
        starting_over: threading.Event,
        left: Callable[[], Mapping[int, int]],
    ) -> None:
        super().__init__("observer")
        self._dsns = source, target
        self._pipeline, self._slot, self._mode, self._tables = pipeline, slot, mode, tables
        self._starting_over = starting_over
        self._left = left
        self._orphaned = False
        self._at_source: psycopg.Connection[Any] | None = None
        self._at_target: psycopg.Connection[Any] | None = None
        self._versions = Versions()
        self.sights: list[Sight] = []
        self.wrong: list[str] = []
        self.looks = 0
        self.orphans = 0
        """How often the sink had transactions that the source had lost in a failover."""
        self.compared = 0
        """How often a view was compared with its SELECT."""
        self.ready = 0
        """The number of views that were up to date at the last look."""
        self.progress = 0
        """How often the applied LSN or the number of finished chunks changed."""
        self._last: tuple[object, ...] = ()

    def work(self) -> None:
        while not self._halt.wait(_SECONDS):
            try:
                self._look()
            except psycopg.OperationalError:
                self._disconnect()
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in (self._at_source, self._at_target):
            if connection is not None:
                connection.close()
        self._at_source = self._at_target = None

    def _look(self) -> None:
        slot = None if self._starting_over.is_set() else self._acknowledged()
        if self._at_target is None:
            self._at_target = psycopg.connect(
                self._dsns[1], autocommit=True, options=_OPTIONS, connect_timeout=5, application_name="observer"
            )
        connection = self._at_target
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            sight = self._sight(connection, slot)
        finally:
            connection.execute("ROLLBACK")
        if sight is not None and (not self.sights or sight != self.sights[-1]):
            self.sights.append(sight)

    def _forget_orphans(self, timeline: int, has: int, consistent: bool) -> None:
        """Reset observations if the sink has transactions lost in a failover: it goes back until all is re-read."""
        left = self._left().get(timeline)
        if left is not None and has > left:
            self._orphaned = True
            self.orphans += 1
        elif consistent:
            self._orphaned = False
        if self._orphaned:
            self._versions = Versions()

    def _acknowledged(self) -> int | None:
        """Return the slot's position; ``None`` if there is no slot, or if its server does not answer."""
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
        try:
            if self._at_source is None:
                self._at_source = psycopg.connect(
                    self._dsns[0], autocommit=True, options=_OPTIONS, connect_timeout=5, application_name="observer"
                )
            found = self._at_source.execute(query, [self._slot]).fetchone()
        except psycopg.OperationalError:
            self._at_source = None
            return None
        return parse_lsn(found[0]) if found and found[0] else None

    def _sight(self, connection: psycopg.Connection[Any], slot: int | None) -> Sight | None:
        if connection.execute("SELECT to_regclass('airflow_cdc.pipelines')").fetchone() == (None,):
            return None
        found = connection.execute(_RECORD, [self._pipeline]).fetchone()
        if found is None:
            return None
        applied, consistent, finished = parse_lsn(found[0]), bool(found[1]), found[2]
        self._forget_orphans(found[4], parse_lsn(found[3]), consistent)
        self.looks += 1
        if (applied, finished) != self._last:
            self._last = (applied, finished)
            self.progress += 1
        if slot is not None and not self._starting_over.is_set():
            self.wrong += acknowledged_early(slot, applied)
        tables, total = {}, None
        for table in self._tables:
            if self._mode == "changelog":
                query = f"SELECT count(*) FROM {table.label} WHERE _xid IS NOT NULL"
                tables[table.label] = (connection.execute(query.encode()).fetchall()[0][0], 0)
                continue
            query = f"SELECT n, version, {table.digest('t')} FROM {table.label} t"
            rows = connection.execute(query.encode()).fetchall()
            tables[table.label] = (len(rows), sum(row[2] for row in rows))
            self.wrong += self._versions.see(table.label, {n: version for n, version, _ in rows})
        if self._mode == "mirror":
            self.ready, wrong = compare_views(connection, self._pipeline)
            self.compared += self.ready
            self.wrong += wrong
            accounts = [f"SELECT sum(balance) FROM {t.label}" for t in self._tables if t.kind == "account"]
            query = f"SELECT sum(s)::bigint FROM ({' UNION ALL '.join(accounts)}) a (s)"
            total = connection.execute(query.encode()).fetchall()[0][0]
        return Sight(applied, consistent, tables, total)
