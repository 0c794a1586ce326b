"""Tables, views over them, and random units, for the tests of views in the stores that keep them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.views.settings import ViewSettings

COLUMNS = ("id", "fk", "v", "me")
Row = tuple[int | None, ...]


def table(name: str, oid: int) -> Target:
    columns = tuple(Column(c, "integer", 23, None, c == "id", True, attnum=n + 1) for n, c in enumerate(COLUMNS))
    return Target(Table(oid, "shop", name, columns, ("id",), "d", None, (Leaf(oid, "shop", name),), "r"), "copy", name)


TARGETS = [table(name, n) for n, name in enumerate("abc", start=1)]
CHUNKS = [Chunk(target.table.label, 0, None, None) for target in TARGETS]
VIEWS = {
    "left3": "SELECT a.id AS k, a.v, b.v AS bv, c.v AS cv, m.v AS mv FROM shop.a LEFT JOIN shop.b ON b.id = a.fk"
    " AND b.v > 1 LEFT JOIN shop.c ON c.id = b.fk LEFT JOIN shop.a m ON m.id = a.me WHERE a.v < 9",
    "many": "SELECT a.id AS k, count(b.id) n, sum(b.v) s, min(c.v) mn FROM shop.a JOIN shop.b ON b.fk = a.fk"
    " LEFT JOIN shop.c ON c.id = b.id AND c.v <> a.v GROUP BY a.id",
    "grp": "SELECT b.v AS k, count(*) n, sum(a.v) s FROM shop.b JOIN shop.a ON a.fk = b.id"
    " LEFT JOIN shop.c ON c.fk = a.id GROUP BY b.v HAVING count(*) > 1",
    "multi": "SELECT a.id AS k, b.v FROM shop.a JOIN shop.b ON b.fk = a.fk LEFT JOIN shop.c ON c.fk = b.v",
}
WHOLE = {
    "one": "SELECT a.id AS k, a.fk, a.v, a.me, b.v AS bv FROM shop.a LEFT JOIN shop.b ON b.id = a.fk",
    "several": "SELECT a.id AS k, a.fk, a.v, a.me, b.v AS bv FROM shop.a JOIN shop.b ON b.fk = a.fk",
}
"""Views that read all columns of their root, of which only keys are noted."""
SETTINGS = tuple(ViewSettings("dwd", name, text) for name, text in VIEWS.items())
WHOLE_SETTINGS = tuple(ViewSettings("dwd", name, text) for name, text in WHOLE.items())


def effect(label: str, rows: Mapping[int, Row | None], truncate: bool = False) -> Effect:
    """Return the effect of a piece; a key without a row is erased."""
    columns = {"erased": pa.array([row is None for row in rows.values()])}
    for n in range(len(COLUMNS)):
        cells = [key if n == 0 else None if row is None else row[n] for key, row in rows.items()]
        columns[f"c{n}"] = pa.array([None if cell is None else str(cell) for cell in cells], pa.large_string())
    return Effect(label, truncate, pa.table(columns))


def random_effects(rnd: random.Random) -> Sequence[Effect]:
    def value(below: int = 8) -> int | None:
        return rnd.choice([None, *range(below)])

    effects = []
    for target in rnd.sample(TARGETS, rnd.randint(1, 3)):
        rows: dict[int, Row | None] = {}
        for _ in range(rnd.randint(1, 4)):
            key = rnd.randint(0, 11)
            rows[key] = None if rnd.random() < 0.3 else (key, value(12), value(), value(12))
        effects.append(effect(target.table.label, rows, rnd.random() < 0.02))
    return effects
