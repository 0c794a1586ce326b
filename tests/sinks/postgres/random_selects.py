"""Tables of a mirror, and random SELECTs over them, for the property tests of views."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table

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
