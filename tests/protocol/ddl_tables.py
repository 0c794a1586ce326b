"""A pipeline that streams one table for each case of DDL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

Mode = Literal["mirror", "changelog"]


TABLE = "CREATE TABLE {t} (id int PRIMARY KEY, a int, v varchar(10), w text)"


ROWS = "INSERT INTO {t} SELECT n, n * 10, 'v' || n, 'w' || n FROM generate_series(1, 12) n"


# Valid under every definition: it names the key and one other column, which no DDL here touches.
DATA = (
    "UPDATE {t} SET w = w || '+' WHERE id % 3 = 0",
    "INSERT INTO {t} (id, w) SELECT coalesce(max(id), 0) + 1, 'new' FROM {t}",
    "DELETE FROM {t} WHERE id = (SELECT min(id) FROM {t})",
)


class Tables(PipelineUnderTest):
    """A pipeline that streams one table per case; a rule captures them."""

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
        self.copy_tables()
        self.apply()

    def play(self, *statements: str) -> None:
        """Execute statements for every table."""
        self.source(*(statement.format(t=f"public.{case}") for case in self.cases for statement in statements))

    def reads(self) -> dict[str, int]:
        """Return H of the last full read of each table."""
        return {
            c.chunk.table.removeprefix("public."): c.watermark.high
            for c in self.record.chunks
            if c.watermark is not None
        }

    def assert_same(self) -> None:
        """Check that the targets equal the sources, and that the record has their definitions."""
        self.assert_verified()
        self.assert_values()
        columns: dict[str, list[tuple[str, int]]] = {}
        for name, column, attnum in self.source_rows(
            "SELECT relname::text, attname::text, attnum FROM pg_attribute JOIN pg_class c ON c.oid = attrelid"
            " WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        ):
            columns.setdefault(name, []).append((column, attnum))
        widths = dict(self.target_rows("SELECT table_name, count(*) FROM information_schema.columns GROUP BY 1"))
        for target in self.record.targets:
            defined = columns[target.table.name]
            defined = [column for column in defined if column[0] in self.rule.get("columns", dict(defined))]
            assert [(column.name, column.attnum) for column in target.table.columns] == defined, target.table.label
            if self.mode == "mirror":
                assert widths[target.table.name] == len(defined), target.table.label

    def assert_values(self) -> None:
        """Check that the targets hold the sources' values, even if they have other columns."""
        with psycopg.connect(self.databases.source) as source, psycopg.connect(self.databases.target) as mirror:
            for target in self.record.targets:
                table, columns = f"{target.table.schema}.{target.table.name}", [c.name for c in target.table.columns]
                if self.mode == "changelog":
                    assert_same_values(self, ["id"], columns, *table.split("."))
                    continue
                names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
                query = f"SELECT {names} FROM {table} WHERE {self.rule.get('where', 'true')} ORDER BY id".encode()
                assert mirror.execute(query).fetchall() == source.execute(query).fetchall(), table


@pytest.fixture
def tables(databases: Databases, tmp_path: Path) -> Callable[..., Tables]:
    """Return a factory of pipelines with one table per case."""
    return lambda cases, mode="mirror", **sections: Tables(tmp_path, databases, list(cases), mode, **sections)
