"""A pipeline that streams one table for each case of DDL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

Mode = Literal["mirror", "changelog"]


TABLE = "CREATE TABLE {t} (id int PRIMARY KEY, a int, v varchar(10), w text)"


ROWS = "INSERT INTO {t} SELECT n, n * 10, 'v' || n, 'w' || n FROM generate_series(1, 12) n"


# Valid under every definition: of the columns beside the key only one is named, which no DDL here touches.
DATA = (
    "UPDATE {t} SET w = w || '+' WHERE id % 3 = 0",
    "INSERT INTO {t} (id, w) SELECT coalesce(max(id), 0) + 1, 'new' FROM {t}",
    "DELETE FROM {t} WHERE id = (SELECT min(id) FROM {t})",
)


class Tables(PipelineUnderTest):
    """A pipeline that streams one table a case, captured by a rule."""

    def __init__(
        self,
        directory: Path,
        databases: Databases,
        cases: Sequence[str],
        mode: Mode,
        table: str = TABLE,
        rule: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> None:
        self.cases, self.mode, self.rule = cases, mode, rule or {}
        rules = [{"table": f"public.{case}", **self.rule} for case in cases]
        super().__init__(directory, databases, rules, sink={"mode": mode}, **sections)
        self.play(table, ROWS)
        self.provision()
        for case in cases:
            self.copy(table=f"public.{case}")
        self.apply()

    def play(self, *statements: str) -> None:
        """Execute statements for every table."""
        self.source(*(statement.format(t=f"public.{case}") for case in self.cases for statement in statements))

    def reads(self) -> dict[str, int]:
        """H of the last reading of each table as a whole."""
        return {
            c.chunk.table.removeprefix("public."): c.watermark.high
            for c in self.record.chunks
            if c.watermark is not None
        }

    def assert_same(self) -> None:
        """The targets are what the sources are, and the record says how they are defined."""
        self.assert_verified()
        self.assert_values()
        for target in self.record.targets:
            table = f"{target.table.schema}.{target.table.name}"
            defined = self.source_rows(
                f"SELECT attname::text, attnum FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
                " AND NOT attisdropped ORDER BY attnum"
            )
            defined = [column for column in defined if column[0] in self.rule.get("columns", dict(defined))]
            assert [(column.name, column.attnum) for column in target.table.columns] == defined, table
            if self.mode == "mirror":
                width = f"SELECT count(*) FROM information_schema.columns WHERE table_name = '{target.table.name}'"
                assert self.target_rows(width) == [(len(defined),)], table

    def assert_values(self) -> None:
        """The targets hold what the sources do, whatever other columns they have."""
        for target in self.record.targets:
            table, columns = f"{target.table.schema}.{target.table.name}", [c.name for c in target.table.columns]
            if self.mode == "changelog":
                assert_same_values(self, ["id"], columns, *table.split("."))
            else:
                names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
                query = f"SELECT {names} FROM {table} WHERE {self.rule.get('where', 'true')} ORDER BY id"
                assert self.target_rows(query) == self.source_rows(query), table


@pytest.fixture
def tables(databases: Databases, tmp_path: Path) -> Callable[..., Tables]:
    """Makes pipelines of one table a case."""
    return lambda cases, mode="mirror", **sections: Tables(tmp_path, databases, list(cases), mode, **sections)
