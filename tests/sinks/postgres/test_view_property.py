"""Random views over random tables in a Postgres mirror: after every random unit they equal their SELECTs.

A case has four tables, two with simple keys, one with a composite key and one without a key, and some random views.
Units insert, update, move, delete and truncate rows, leave out values that were not sent, and come in several pieces;
between them, rows and tables are read again, tables change, and views are built, queued and drained in small portions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional import views
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.sinks.begun_sink import IDENTITY, ORIGIN, WATERMARK, Begun, text
from tests.sinks.postgres.random_changes import Mirror, Row
from tests.sinks.postgres.random_selects import OIDS, TARGETS, random_select, whole_select
from tests.support.given_rows import GivenRows
from tests.support.postgres_store import PostgresStore

Selects = tuple[int, Callable[[Random], str]]
PARTS: Selects = (8, random_select)


class Case:
    """A pipeline with random views.

    :param selects: the number of views, and a function that returns a random SELECT.
    """

    def __init__(self, database: str, chance: Random, selects: Selects) -> None:
        self.chance = chance
        self.mirror = Mirror(chance)
        self.settings = tuple(self._views(*selects))
        sink = PostgresSink(database, "p", "mirror", views=self.settings)
        chunks = [Chunk(each.table.label, 0, None, None) for each in TARGETS.values()]
        sink.prepare(list(TARGETS.values()), chunks, IDENTITY, 100)
        self.begun = Begun(PostgresStore(database), sink, sink.take_epoch("test"))
        self.sink = sink
        for name, chunk in zip(TARGETS, chunks, strict=True):
            sink.write_chunk(self.begun.epoch, TARGETS[name], chunk, ORIGIN, self._read(name))
        self.keeper = ViewKeeper(sink, self.begun.epoch)
        self.applied = WATERMARK.high
        assert sink.commit(self.begun.epoch, 100, self.applied, [])
        self.connection = psycopg.connect(
            database, autocommit=True, options="-c search_path=pg_catalog -c timezone=UTC -c datestyle=ISO"
        )

    def _views(self, count: int, select: Callable[[Random], str]) -> Iterator[ViewSettings]:
        tables = {each.table.label: each.table for each in TARGETS.values()}
        number = 0
        while number < count:
            refresh = 0.001 if self.chance.random() < 0.1 else None
            limit = self.chance.choice([1, 3, 1000, 1000])
            view = ViewSettings("dwd", f"v{number}", select(self.chance), refresh, limit)
            try:
                parse_view(view, tables, "postgres")
            except ConfigError:
                continue
            yield view
            number += 1

    def _read(self, name: str) -> GivenRows:
        """Return the rows of a table as the source has them."""
        rows = list(self.mirror.bag.elements()) if name == "k" else list(self.mirror.rows[name].values())
        return self._given(name, rows)

    def _given(self, name: str, rows: Sequence[Row]) -> GivenRows:
        columns = [text(*(row[n] for row in rows)) for n in range(len(self.mirror.columns(name)))]
        batch = pa.RecordBatch.from_arrays(columns, names=[f"f{n}" for n in range(len(columns))])
        return GivenRows(iter([batch] if rows else []), lambda: WATERMARK)

    def step(self) -> None:
        """Do something at random."""
        kind = self.chance.random()
        if kind < 0.65:
            self.unit()
        elif kind < 0.85:
            for _ in range(self.chance.choice([1, 4, 12, 1000])):
                if not self.keeper.step():
                    break
        elif kind < 0.95:
            self.reread()
        else:
            self.redefine()

    def unit(self) -> None:
        pieces = [
            self.begun.piece(*self.mirror.effects(), index=index) for index in range(self.chance.choice([1, 1, 2, 3]))
        ]
        assert self.sink.commit(self.begun.epoch, self.applied, self.applied + 10, pieces)
        self.applied += 10

    def reread(self) -> None:
        name = self.chance.choice("abck")
        target, keys = self.mirror.targets[name], None
        if name != "k" and self.chance.random() < 0.6:
            keys = frozenset(self.mirror.key(name) for _ in range(self.chance.randint(1, 3)))
        known = self.mirror.rows.get(name, {})
        for key in list(known) if keys is None else keys:  # the source has changed since
            if self.chance.random() < 0.5:
                known.pop(key, None)
            elif self.chance.random() < 0.5:
                known[key] = self.mirror.row(name, key)
        rows = self._read(name) if keys is None else self._given(name, [known[key] for key in keys if key in known])
        self.sink.replace(self.begun.epoch, target, keys, rows, target)

    def redefine(self) -> None:
        """Change the type of a column."""
        name = self.chance.choice("abck")
        before = self.mirror.targets[name]
        chosen = self.chance.choice(["v", "x", "fk"])
        columns = tuple(
            replace(c, type="bigint", type_oid=OIDS["bigint"]) if c.name == chosen else c for c in before.table.columns
        )
        after = replace(before, table=replace(before.table, columns=columns))
        self.sink.redefine(self.begun.epoch, before, after)
        self.mirror.targets[name] = after

    def check(self) -> int:
        """Compare the views that are up to date with their SELECTs; return their number."""
        checked = 0
        for version in self.sink.view_versions():
            if version.in_place and version.kept and version.behind is None:
                select = version.settings.sql.replace("shop.", "copy.")
                table = f"dwd.{version.view.name}"
                for one, other in ((select, f"TABLE {table}"), (f"TABLE {table}", select)):
                    wrong = self.connection.execute(
                        f"SELECT q::text FROM ({one}) q EXCEPT ALL SELECT q::text FROM ({other}) q"  # type: ignore[arg-type]
                    ).fetchall()
                    assert not wrong, (version.settings.sql, one[:20], [row[0][:80] for row in wrong[:3]])
                checked += 1
        return checked

    def finish(self) -> None:
        while self.keeper.step(everything=True):
            pass
        assert self.keeper.reached(self.applied)
        assert self.check() == len(self.settings)
        self.connection.close()


@pytest.fixture(scope="module")
def database(target_server: PostgresServer) -> Iterator[str]:
    create_database(target_server, "random_views")
    yield target_server.dsn("random_views")
    drop_database(target_server, "random_views")


def run_case(database: str, seed: int, steps: int, selects: Selects = PARTS) -> int:
    """Run a case; return the number of comparisons of a view with its SELECT before the last ones."""
    PostgresStore(database).query("DROP SCHEMA IF EXISTS airflow_cdc, copy, dwd CASCADE")
    case = Case(database, Random(seed), selects)
    for _ in range(3):
        case.unit()
    while case.keeper.step() and case.chance.random() < 0.99:
        pass
    checked = 0
    for _ in range(steps):
        case.step()
        checked += case.check()
    case.finish()
    return checked


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "FIRST_PORTION", 2)
    monkeypatch.setattr(views, "MOST_SECONDS", 0.0)  # so that portions do not grow
    monkeypatch.setattr(views, "LEAST_PORTION", 2)


@pytest.mark.slow
@given(st.integers(0, 1 << 32))
@settings(max_examples=6)
def test_views_equal_their_selects_after_every_step(database: str, seed: int) -> None:
    run_case(database, seed, 25)


@pytest.mark.slow
@given(st.integers(0, 1 << 32))
@settings(max_examples=6)
def test_views_of_whole_rows_equal_their_selects_after_every_step(database: str, seed: int) -> None:
    """Only the keys of changed rows are noted."""
    run_case(database, seed, 25, (1, whole_select))
