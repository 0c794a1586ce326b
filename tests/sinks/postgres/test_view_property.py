"""Random views over random tables in a Postgres mirror: after every random unit they equal their SELECTs.

A case has four tables, two with simple keys, one with a composite key and one without a key, and some random views.
Units insert, update, move, delete and truncate rows, leave out values that were not sent, and come in several pieces;
between them, rows and tables are read again, tables change, and views are built, queued and drained in small portions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional import views
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from airflow_cdc_provider.engine.views.select_parser import parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.sinks.begun_sink import IDENTITY, ORIGIN, WATERMARK, Begun, text
from tests.support.given_rows import GivenRows
from tests.support.postgres_store import PostgresStore

TYPES = {
    "id": "integer",
    "part": "integer",
    "fk": "integer",
    "v": "integer",
    "t": "text",
    "n": "numeric",
    "x": "integer",
}
OIDS = {"integer": 23, "bigint": 20, "text": 25, "numeric": 1700}
NUMBERS = ("fk", "v", "id")
Row = tuple[str | None, ...]


def a_table(name: str, oid: int, columns: Sequence[str], key: tuple[str, ...]) -> Target:
    described = tuple(
        Column(each, TYPES[each], OIDS[TYPES[each]], None, each in key, True, attnum=n)
        for n, each in enumerate(columns, start=1)
    )
    identity = "d" if key else "f"
    made = Table(oid, "shop", name, described, key, identity, None, (Leaf(oid, "shop", name),), "r", attnums=9)
    return Target(made, "copy", name)


TARGETS = {
    "a": a_table("a", 1, ("id", "fk", "v", "t", "n", "x"), ("id",)),
    "b": a_table("b", 2, ("id", "fk", "v", "t", "n", "x"), ("id",)),
    "c": a_table("c", 3, ("v", "id", "part", "fk", "t", "n", "x"), ("id", "part")),
    "k": a_table("k", 4, ("fk", "v", "t", "id", "x"), ()),
}


# -- random SELECTs --------------------------------------------------------------------------------


def random_select(chance: Random) -> str:
    """Return a random SELECT over the tables, most of them such as can be maintained."""
    aliases = [("r", chance.choice("aabbc" if chance.random() < 0.6 else "abck"))]
    joins = []
    for n in range(chance.choice([0, 1, 1, 2, 2, 3])):
        name, table = f"j{n}", chance.choice("abck")
        joins.append((name, table, *_a_join(chance, name, aliases)))
        aliases.append((name, table))
    source = f"shop.{aliases[0][1]} r"
    for place, (name, table, kind, condition) in enumerate(joins):
        kind = kind if place == 0 or kind != "RIGHT" else "LEFT"
        source += f" {kind} JOIN shop.{table} {name} ON {condition}"
    where = f" WHERE {_a_condition(chance, aliases)}" if chance.random() < 0.4 else ""
    if chance.random() < 0.45:
        return _grouped(chance, aliases, source, where)
    first = joins[0][:2] if joins and joins[0][2] == "RIGHT" else aliases[0]
    outputs = [f"{first[0]}.{column} AS k{n}" for n, column in enumerate(TARGETS[first[1]].table.key)]
    for n in range(chance.randint(1, 4)):
        outputs.append(f"{_an_expression(chance, aliases)} AS c{n}")
    chance.shuffle(outputs)
    return f"SELECT {', '.join(outputs)} FROM {source}{where}"


def whole_select(chance: Random) -> str:
    """Return a SELECT that reads all columns of its first table, and joins another one."""
    root, other = chance.sample("abc", 2)
    columns = ", ".join(f"r.{column.name} AS w{n}" for n, column in enumerate(TARGETS[root].table.columns))
    join = f"{chance.choice(['JOIN', 'LEFT JOIN'])} shop.{other} o ON o.{chance.choice(NUMBERS)} = r.fk"
    return f"SELECT {columns}, o.v AS ov FROM shop.{root} r {join}"


def _a_join(chance: Random, name: str, earlier: Sequence[tuple[str, str]]) -> tuple[str, str]:
    parts = [
        f"{name}.{chance.choice(('id', 'id', *NUMBERS))} = {chance.choice(earlier)[0]}.{chance.choice(NUMBERS)}"
        for _ in range(1 if chance.random() < 0.75 else 2)
    ]
    if chance.random() < 0.3:
        parts.append(
            f"{name}.v {chance.choice(['<>', '<', '>='])} {chance.choice([*(e[0] + '.v' for e in earlier), '3'])}"
        )
    if chance.random() < 0.1:
        parts.append(f"({name}.t IS NOT NULL OR {chance.choice(earlier)[0]}.v IS NULL)")
    return chance.choice(["JOIN", "LEFT", "LEFT", "RIGHT"]).replace("JOIN", "INNER"), " AND ".join(parts)


def _a_condition(chance: Random, aliases: Sequence[tuple[str, str]]) -> str:
    one, other = chance.choice(aliases)[0], chance.choice(aliases)[0]
    return chance.choice(
        [f"{one}.v < 5", f"{one}.t IS NULL OR {other}.fk > 2", f"coalesce({one}.v, 1) <> coalesce({other}.fk, 2)"]
    )


def _an_expression(chance: Random, aliases: Sequence[tuple[str, str]]) -> str:
    one, other = chance.choice(aliases)[0], chance.choice(aliases)[0]
    return chance.choice(
        [
            f"{one}.v",
            f"{one}.t",
            f"{one}.fk + {other}.v",
            f"coalesce({one}.t, 'none') || {other}.v::text",
            f"CASE WHEN {one}.v > 3 THEN {other}.t END",
            f"row_to_json(ROW({one}.v, {other}.t))",
        ]
    )


def _grouped(chance: Random, aliases: Sequence[tuple[str, str]], source: str, where: str) -> str:
    root = chance.choice(aliases)[0] if chance.random() < 0.6 else aliases[0][0]
    groups = chance.sample(["v", "fk", "t", "id"], chance.choice([1, 1, 2]))
    outputs = [f"{root}.{column} AS g{n}" for n, column in enumerate(groups)]
    for n in range(chance.randint(1, 3)):
        one = chance.choice(aliases)[0]
        outputs.append(
            chance.choice(
                [
                    "count(*)",
                    f"count(DISTINCT {one}.v)",
                    f"sum({one}.v)",
                    f"min({one}.t)",
                    f"max({one}.fk) FILTER (WHERE {one}.v > 2)",
                    f"string_agg({one}.t, ',' ORDER BY {one}.t)",
                ]
            )
            + f" AS c{n}"
        )
    having = " HAVING count(*) > 1" if chance.random() < 0.3 else ""
    return (
        f"SELECT {', '.join(outputs)} FROM {source}{where} GROUP BY {', '.join(f'{root}.{g}' for g in groups)}{having}"
    )


# -- random changes --------------------------------------------------------------------------------


@dataclass
class Mirror:
    """The tables as they should be, from which random changes that a source could have made are chosen."""

    chance: Random

    def __post_init__(self) -> None:
        self.targets = dict(TARGETS)
        self.rows: dict[str, dict[Row, Row]] = {name: {} for name in "abc"}
        self.bag: Counter[Row] = Counter()

    def columns(self, name: str) -> list[str]:
        return [column.name for column in self.targets[name].table.columns]

    def value(self, column: str) -> str | None:
        if self.chance.random() < 0.15:
            return None
        if column == "t":
            return self.chance.choice(["x", "y", "z" * 3000])
        if column == "n":
            return self.chance.choice(["1.0", "1.00", "2"])
        return str(self.chance.randint(0, 7))

    def row(self, name: str, key: Row) -> Row:
        given = dict(zip(self.targets[name].table.key, key, strict=True))
        return tuple(given.get(column) or self.value(column) for column in self.columns(name))

    def key(self, name: str) -> Row:
        return tuple(str(self.chance.randint(0, 6 if n == 0 else 1)) for n in range(len(self.targets[name].table.key)))

    def effects(self) -> list[Effect]:
        """Return the effects of a piece."""
        return [self._effect(name) for name in self.chance.sample("abck", self.chance.randint(1, 3))]

    def _effect(self, name: str) -> Effect:
        label, truncate = self.targets[name].table.label, self.chance.random() < 0.04
        if name == "k":
            return self._counted(label, truncate)
        known = self.rows[name]
        if truncate:
            known.clear()
        before, written, origins = dict(known), dict[Row, Row | None](), dict[Row, Row]()
        for _ in range(self.chance.randint(1, 4)):
            key, kind = self.key(name), self.chance.random()
            if key in written or key in origins.values():
                continue
            if kind < 0.25:
                written[key] = None
            elif kind < 0.5 and key in before:
                other = self.key(name)
                if other in written or other in origins.values():
                    continue
                written[key] = None  # a move, of which the text was not sent
                written[other] = self.row(name, other)
                origins[other] = key
            else:
                written[key] = self.row(name, key)
                if key in before and self.chance.random() < 0.3:
                    origins[key] = key
        place = self.columns(name).index("t")
        for key, row in written.items():
            if key in origins and row is not None:
                row = tuple(before[origins[key]][place] if n == place else cell for n, cell in enumerate(row))
                written[key] = row
            if row is None:
                known.pop(key, None)
            else:
                known[key] = row
        return self._as_effect(name, label, truncate, written, origins, place)

    def _as_effect(
        self,
        name: str,
        label: str,
        truncate: bool,
        written: dict[Row, Row | None],
        origins: dict[Row, Row],
        place: int,
    ) -> Effect:
        names, keys = self.columns(name), self.targets[name].table.key
        columns = {"erased": pa.array([row is None for row in written.values()], pa.bool_())}
        for n, column in enumerate(names):
            cells = []
            for key, row in written.items():
                sent = key not in origins or n != place
                cells.append(
                    key[keys.index(column)] if row is None and column in keys else row[n] if row and sent else None
                )
            columns[f"c{n}"] = text(*cells)
        if origins:
            columns["missing"] = text(*(f"{{{place}}}" if key in origins else None for key in written))
            for n in range(len(keys)):
                columns[f"o{n}"] = text(*(origins[key][n] if key in origins else None for key in written))
        return Effect(label, truncate, pa.table(columns))

    def _counted(self, label: str, truncate: bool) -> Effect:
        if truncate:
            self.bag.clear()
        changes = Counter[Row]()
        for row in list(self.bag):
            if self.chance.random() < 0.3:
                changes[row] -= self.chance.randint(1, self.bag[row])
        for _ in range(self.chance.randint(0, 3)):
            changes[tuple(self.value(column) for column in self.columns("k"))] += self.chance.randint(1, 2)
        changes = Counter({row: count for row, count in changes.items() if count})
        self.bag = Counter({row: n for row in {*self.bag, *changes} if (n := self.bag[row] + changes[row])})
        columns = {f"c{n}": text(*(row[n] for row in changes)) for n in range(len(self.columns("k")))}
        return Effect(label, truncate, pa.table({"count": pa.array(changes.values(), pa.int64()), **columns}))


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
