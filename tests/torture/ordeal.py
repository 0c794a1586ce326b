"""One run: its own servers, writers, a pipeline, its nemesis, and finally the checks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.postgres import PostgresServer
from tests.conftest import Databases, create_database, create_roles
from tests.support.databases import execute, query_rows
from tests.support.pipelines import PipelineUnderTest
from tests.torture.airflow import Airflow
from tests.torture.checks import violations
from tests.torture.driver import Driver
from tests.torture.history import TARGET_SETUP, Entry, History, Truth, gaps, readings
from tests.torture.nemesis import ACTIONS, Nemesis, schedule
from tests.torture.observer import Observer
from tests.torture.schema import LANES, OPENING_BALANCE, SETUP, TOTAL_ACCOUNTS, Table, tables
from tests.torture.source import Source
from tests.torture.views import settings_of, views
from tests.torture.writers import Writer

_SERVER = {"fsync": "off", "wal_sender_timeout": "4s", "max_connections": "60", "TimeZone": "UTC"}
_CATCH_UP_SECONDS = 900.0
_STUCK_SECONDS = 300.0
"""Seconds without progress after which a pipeline is stuck, even on a slow machine."""
_SIGHTS = 20
"""States of the consistent target that readers must have seen while writers were active."""
_SIGHTS_SECONDS = 120.0
_STEPS_SECONDS = 600.0
_SHOWN = 3
_PIPELINE = "torture"


@dataclass
class Report:
    """The results of a run."""

    seed: int
    mode: str
    counts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def mode_of(seed: int) -> str:
    """Return the mode of a seed; about every third seed tortures a changelog."""
    return random.Random(f"{seed}/mode").choice(("mirror", "mirror", "changelog"))


def torture(
    seed: int, seconds: float, mode: str, directory: Path, say: Callable[[str], None], steps: int = 0
) -> Report:
    """Torture a pipeline.

    :param seconds: duration of writers and nemesis; the pipeline then gets the time that it needs to catch up.
    :param directory: new and open to all users; it keeps servers, logs, pipeline file and state.
    :param say: called with events as they happen.
    :param steps: minimum number of steps of the nemesis, regardless of the time.
    """
    report, began = Report(seed, mode), time.monotonic()

    def note(text: str) -> None:
        say(f"{time.monotonic() - began:7.1f}  {text}")

    made = tables(seed)
    for table in made:
        note(
            f"{table.name}: {table.kind}, key {', '.join(table.key.names)}, identity {table.identity}, {table.columns}"
        )
    with _servers(directory) as (source, target):
        databases = Databases(source.dsn("torture"), target.dsn("torture"))
        for server in (source.primary, target):
            create_database(server, "torture")
        execute(databases.source, *SETUP, *(s for table in made for s in table.create()))
        execute(databases.target, *TARGET_SETUP)
        _Ordeal(report, seed, mode, made, source, target, databases, directory / "pipeline", note).undergo(
            seconds, steps
        )
    report.counts["seconds"] = round(time.monotonic() - began)
    return report


@contextmanager
def _servers(directory: Path) -> Iterator[tuple[Source, PostgresServer]]:
    """Run source and target, and stop them at the end, but keep their logs."""
    with ExitStack() as stack:
        source = Source(directory, _SERVER)
        stack.callback(source.stop)
        target = PostgresServer.create(directory / "target", settings=_SERVER)
        stack.callback(target.stop, "immediate")
        target.start()
        create_roles(target)
        yield source, target


class _Ordeal:
    def __init__(
        self,
        report: Report,
        seed: int,
        mode: str,
        made: list[Table],
        source: Source,
        target: PostgresServer,
        databases: Databases,
        directory: Path,
        note: Callable[[str], None],
    ) -> None:
        chance = random.Random(f"{seed}/pipeline")
        directory.mkdir()
        self._report, self._mode, self._tables, self._note = report, mode, made, note
        self._source, self._target = source, target
        self._pipeline = PipelineUnderTest(
            directory,
            databases,
            [table.label for table in made],
            pipeline=_PIPELINE,
            sink=settings_of(mode, made),
            snapshot={"chunk_rows": chance.choice((40, 150, 1000)), "parallelism": chance.choice((1, 2, 3))},
            stream={"max_batch_bytes": chance.choice(("1MiB", "4MiB", "16MiB"))},
        )
        slot = self._pipeline.pipeline.source.slot
        self._truth = Truth(databases.source)
        starting_over = threading.Event()
        self._observer = Observer(
            databases.source, databases.target, _PIPELINE, slot, mode, made, starting_over, lambda: source.left
        )
        self._airflow = Airflow(self._pipeline.file)
        self._driver = Driver(self._pipeline, self._airflow, starting_over, note)
        self._nemesis = Nemesis(
            schedule(seed), source, target, self._pipeline, self._driver, self._observer, self._truth, made, note
        )
        pace = chance.choice((0.01, 0.05, 0.2))
        self._writers = [Writer(databases.source, seed, lane, made, pace) for lane in range(LANES)]

    def undergo(self, seconds: float, steps: int) -> None:
        try:
            for thread in (*self._writers, self._observer, self._driver, self._nemesis):
                thread.start()
            self._wait(seconds, lambda: False)
            self._wait(
                _STEPS_SECONDS, lambda: not self._nemesis.is_alive() or sum(self._nemesis.done.values()) >= steps
            )
            self._nemesis.stop()
            # On a slow machine the mirror may become consistent only now.
            self._wait(_SIGHTS_SECONDS, lambda: sum(s.consistent for s in self._observer.sights) >= _SIGHTS)
            for writer in self._writers:
                writer.stop()
            self._note("writers and nemesis have stopped")
            self._catch_up()
            self._check()
        finally:
            try:
                self._driver.stop()
            finally:
                self._airflow.stop()
                self._pipeline.end_commands()
        self._count()

    def _wait(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let all components work until it is enough, time is over, or one of them has found a violation."""
        threads = (*self._writers, self._observer, self._driver)

        def over() -> bool:
            return enough() or bool(self._wrong()) or not all(thread.is_alive() for thread in threads)

        await_condition(over, seconds, interval=0.5)

    def _wrong(self) -> list[str]:
        return self._observer.wrong + self._driver.wrong + self._nemesis.wrong

    def _catch_up(self) -> None:
        """Wait until everything is applied and acknowledged, then stop the job."""
        marker = self._pipeline.marker()

        def caught_up() -> bool:
            with_record = query_rows(self._pipeline.databases.target, "SELECT to_regclass('airflow_cdc.pipelines')")
            if self._wrong() or with_record == [(None,)]:
                return bool(self._wrong())
            # DDL that no change follows is applied when a heartbeat has found it.
            if any(missing for missing in map(self._missing_columns, self._tables)):
                return False
            if self._mode == "mirror" and self._observer.ready < len(views(self._tables)):
                return False
            record = self._pipeline.record
            return record.consistent and record.applied >= marker

        seen, began = self._observer.progress, time.monotonic()
        moved = began
        while not caught_up():
            now = time.monotonic()
            if self._observer.progress != seen:
                seen, moved = self._observer.progress, now
            if now - moved > _STUCK_SECONDS or now - began > _CATCH_UP_SECONDS:
                stuck = f"the pipeline has not caught up in {now - began:.0f} seconds, nor got on in {now - moved:.0f}"
                self._report.wrong.append(f"{stuck}; {self._driver.last}")
                break
            time.sleep(0.5)
        self._note("caught up")
        self._driver.end()
        self._observer.stop()

    def _check(self) -> None:
        wrong = self._report.wrong
        self._note("checks")
        wrong += self._wrong()
        if wrong:
            return
        if self._mode == "mirror":
            wrong += [text for table in self._tables for text in self._differences(table)]
        verified = self._pipeline.start("verify", "--json").wait()
        if verified.code != 0:
            wrong.append(f"verify says {verified.stdout[-2000:]}{verified.stderr[-2000:]}")
        wrong += violations(self._history(), self._mode, 2 * TOTAL_ACCOUNTS * OPENING_BALANCE)

    def _missing_columns(self, table: Table) -> set[str]:
        """Return the columns in which source and target differ; a changelog may have more, and keeps dropped ones."""
        query = (
            f"SELECT attname FROM pg_attribute WHERE attrelid = '{table.label}'::regclass"
            " AND attnum > 0 AND NOT attisdropped"
        )
        databases = self._pipeline.databases
        at_source, at_target = (
            {name for (name,) in query_rows(d, query)} for d in (databases.source, databases.target)
        )
        return at_source ^ at_target if self._mode == "mirror" else at_source - at_target

    def _differences(self, table: Table) -> list[str]:
        """Compare source and target, row by row and value by value, and return the differences."""
        query = f"SELECT {table.key.text()}, to_jsonb(t)::text FROM {table.label} t".encode()
        found = []
        for dsn in (self._pipeline.databases.source, self._pipeline.databases.target):
            with psycopg.connect(dsn, options="-c TimeZone=UTC") as connection:
                found.append(dict(connection.execute(query).fetchall()))
        at_source, at_target = found
        keys = [k for k in at_source.keys() | at_target.keys() if at_source.get(k) != at_target.get(k)]
        return [
            f"{table.label} {key}: {str(at_source.get(key))[:300]} at the source, {str(at_target.get(key))[:300]}"
            f" at the target ({len(keys)} rows differ)"
            for key in keys[:_SHOWN]
        ]

    def _history(self) -> History:
        databases = self._pipeline.databases
        history = History(
            self._truth.transactions(),
            readings(databases.source, databases.target, self._tables, self._source.left),
            gaps(databases.target),
            self._observer.sights,
        )
        if self._mode == "changelog":
            for table in self._tables:
                # For a deleted row a changelog has the columns of the key; without a key it has the previous row.
                key = f"coalesce({table.key.text()}, {table.key.text_in('_before')})"
                query = (
                    f"SELECT _xid, (_commit_lsn - '0/0')::bigint, _seq, _op::text, {key}, version"
                    f" FROM {table.label} WHERE _xid IS NOT NULL"
                )
                history.entries += [Entry(table.label, *row) for row in query_rows(databases.target, query)]
                ((count,),) = query_rows(databases.target, f"SELECT count(*) FROM {table.label} WHERE _op = 'r'")
                history.snapshot_rows[table.label] = count
        self._report.counts |= {
            "transactions": len(history.transactions),
            "changes": sum(len(t.changes) for t in history.transactions),
            "reads committed": len(history.readings),
        }
        return history

    def _count(self) -> None:
        self._report.counts |= {
            "looks at the target": self._observer.looks,
            "different consistent states seen": sum(s.consistent for s in self._observer.sights),
            "comparisons of a view": self._observer.compared,
            "starts of the pipeline": self._driver.starts,
            "how jobs ended": dict(self._driver.ends),
            "looks at a sink with what a failover lost": self._observer.orphans,
            "steps of the nemesis": sum(self._nemesis.done.values()),
            "those steps": dict(self._nemesis.done),
            "steps not reached": sorted(ACTIONS.keys() - self._nemesis.done.keys()),
        }
