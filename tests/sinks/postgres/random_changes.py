"""Random changes of the tables of a mirror, for the property tests of views."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pyarrow as pa

from airflow_cdc_provider.engine.core.effect import Effect
from tests.sinks.begun_sink import text
from tests.sinks.postgres.random_selects import TARGETS

Row = tuple[str | None, ...]


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
