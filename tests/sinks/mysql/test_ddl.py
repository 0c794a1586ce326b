"""DDL of the source, followed in MariaDB: by one ALTER TABLE, by a table that is filled aside, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, GateClosed
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.mysql import MysqlPipeline

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE public.{t} (id int PRIMARY KEY, a int, v varchar(10), w text, p numeric(8,2), f numeric(8,2)[])"
ROWS = (
    "INSERT INTO public.{t} SELECT n, n * 10, 'v' || n, 'w' || n, n + 0.5, ARRAY[n, NULL] FROM generate_series(1, 12) n"
)
# Valid under every definition: it names the key and one other column, which no DDL here touches.
DATA = (
    "UPDATE public.{t} SET w = w || '+' WHERE id::int % 3 = 0",
    "INSERT INTO public.{t} (id, w) SELECT max(id) + 1, 'new' FROM public.{t}",
    "DELETE FROM public.{t} WHERE id = (SELECT min(id) FROM public.{t})",
)
# The interesting columns of the mirror afterwards, and what happens next.
FOLLOWED = {
    "a column without a default": ("ADD COLUMN b timestamptz", {"b": "datetime(6)"}),
    "a column with a default": ("ADD COLUMN b bytea DEFAULT '\\x00ff'", {"b": "longblob"}),
    "a column with text in it": ("ADD COLUMN b text DEFAULT 'it''s \\ %s'", {"b": "longtext"}),
    "an array": ("ADD COLUMN b int[] DEFAULT '{1,NULL}'", {"b": "longtext"}),
    "a column that is gone": ("DROP COLUMN a", {"a": None}),
    "a new name": ("RENAME COLUMN a TO b", {"a": None, "b": "int"}),
    "another case": ('RENAME COLUMN a TO "A"', {"A": "int"}),
    "a longer text": ("ALTER COLUMN v TYPE text", {"v": "longtext"}),
    "more digits": ("ALTER COLUMN p TYPE numeric(20,2)", {"p": "decimal(20,2)"}),
    "any digits": ("ALTER COLUMN p TYPE numeric", {"p": "longtext"}),
}
READ_AGAIN = {
    "a wider key": ("ALTER COLUMN id TYPE bigint", {"id": "bigint"}),
    "numbers that become text": ("ALTER COLUMN a TYPE text USING 'n' || a", {"a": "longtext"}),
    "values of their own": ("ADD COLUMN b uuid DEFAULT gen_random_uuid()", {"b": "char(36)"}),
    "one in the place of another": ("DROP COLUMN a, ADD COLUMN a date DEFAULT '2000-01-01'", {"a": "date"}),
    "an array that becomes a number": ("ALTER COLUMN f TYPE numeric(8,2) USING f[1]", {"f": "decimal(8,2)"}),
}

# For a change that the history of a changelog does not allow: the column.
UNCONVERTED = {"one in the place of another": "a", "an array that becomes a number": "f"}

CHANGES = FOLLOWED | READ_AGAIN
NAMES = {change: f"t{number}" for number, change in enumerate(CHANGES)}


def on(tables: Iterable[str], *statements: str) -> list[str]:
    """Return statements for each of some tables."""
    return [statement.replace("{t}", table) for table in tables for statement in statements]


def pipeline_of(
    databases: Databases, server: MariadbServer, directory: Path, mode: str = "mirror", tables: Sequence[str] = ("t",)
) -> MysqlPipeline:
    names = [f"public.{table}" for table in tables]
    pipeline = MysqlPipeline(directory, databases, server, names, sink={"mode": mode, "schema": "copy"})
    pipeline.source(*on(tables, TABLE, ROWS))
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    return pipeline


def columns_of(pipeline: MysqlPipeline, table: str) -> dict[str, str]:
    found = pipeline.target_rows(
        "SELECT column_name, column_type FROM information_schema.columns"
        f" WHERE table_schema = 'copy' AND table_name = '{table}'"
    )
    return {name: re.sub(r"int\(\d+\)", "int", kind) for name, kind in found}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_what_becomes_of_changes(databases: Databases, mariadb: MariadbServer, tmp_path: Path, mode: str) -> None:
    """Each change has its own table, and all are in one batch of the log."""
    pipeline = pipeline_of(databases, mariadb, tmp_path, mode, list(NAMES.values()))
    for change, table in NAMES.items():
        pipeline.source(*on([table], DATA[0], f"ALTER TABLE public.{{t}} {CHANGES[change][0]}", *DATA))
    if mode == "changelog":
        # The old values of the history cannot be converted; the column has to be set aside.
        for change, column in UNCONVERTED.items():
            with pytest.raises(CannotFollow, match=rf"old values of {column} cannot become .* without loss"):
                pipeline.apply()
            pipeline.target(f'ALTER TABLE "copy".{NAMES[change]} RENAME COLUMN {column} TO {column}_before')
    pipeline.apply()
    pipeline.source(*on(NAMES.values(), *DATA))
    pipeline.apply()
    pipeline.assert_verified()
    for change, table in NAMES.items():
        found, expected = columns_of(pipeline, table), dict(CHANGES[change][1])
        if mode == "changelog":
            expected = {name: kind for name, kind in expected.items() if kind is not None}
            again = pipeline.target_rows(f"SELECT COUNT(*) FROM \"copy\".{table} WHERE _op = 't'")
            assert again == [(1 if change in READ_AGAIN else 0,)], change
        assert {name: found.get(name) for name in expected} == expected, change


def test_a_table_that_is_made_anew_keeps_its_indexes(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    pipeline = pipeline_of(databases, mariadb, tmp_path)
    pipeline.target('CREATE INDEX mine ON "copy".t (a)')
    pipeline.source("ALTER TABLE public.t ALTER COLUMN v TYPE bytea USING v::bytea")
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.target_rows("SHOW INDEX FROM \"copy\".t WHERE Key_name = 'mine'")
    assert pipeline.target_rows("SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'aside%'") == []


def test_what_would_be_lost_with_a_table_is_named(databases: Databases, mariadb: MariadbServer, tmp_path: Path) -> None:
    pipeline = pipeline_of(databases, mariadb, tmp_path)
    pipeline.target('CREATE TRIGGER "copy".mine BEFORE INSERT ON "copy".t FOR EACH ROW SET NEW.w = NEW.w')
    pipeline.source("ALTER TABLE public.t ALTER COLUMN a TYPE text")
    with pytest.raises(CannotFollow, match=r"triggers or foreign keys would be lost: mine"):
        pipeline.apply()
    pipeline.target('DROP TRIGGER "copy".mine')
    pipeline.apply()
    pipeline.assert_verified()


def test_what_stands_in_the_way_of_an_alteration_is_named(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path
) -> None:
    pipeline = pipeline_of(databases, mariadb, tmp_path)
    pipeline.target('ALTER TABLE "copy".t ADD CONSTRAINT mine CHECK (a < 1000 OR v <> w)')
    pipeline.source("ALTER TABLE public.t DROP COLUMN a", *on("t", *DATA))
    with pytest.raises(CannotFollow, match=r"Unknown column 'a' in 'CHECK'|Check constraint 'mine' uses column 'a'"):
        pipeline.apply()
    assert pipeline.target_rows("SELECT * FROM airflow_cdc.pending") == []
    pipeline.target('ALTER TABLE "copy".t DROP CONSTRAINT mine')
    pipeline.apply()
    pipeline.assert_verified()


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_target_that_is_gone_is_made_and_filled(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path, mode: str
) -> None:
    pipeline = pipeline_of(databases, mariadb, tmp_path, mode)
    pipeline.target('DROP TABLE "copy".t')
    with pytest.raises(GateClosed, match=r"no longer exist: copy\.t"):
        pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source(*on("t", *DATA))
    pipeline.apply()
    pipeline.assert_verified()


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_everything_is_read_again_with_a_new_slot_and_another_definition(
    databases: Databases, mariadb: MariadbServer, tmp_path: Path, mode: str
) -> None:
    pipeline = pipeline_of(databases, mariadb, tmp_path, mode)
    pipeline.source("ALTER TABLE public.t ADD COLUMN b date, DROP COLUMN a", *on("t", *DATA))
    provisioning.start_over(pipeline.pipeline, takeover=False)
    before = pipeline.target_rows('SELECT COUNT(*), MAX(a) FROM "copy".t')
    assert before[0][0] >= 12  # nothing has been changed yet
    pipeline.copy()
    pipeline.source(*on("t", *DATA))
    pipeline.apply()
    pipeline.assert_verified()
    assert columns_of(pipeline, "t")["b"] == "date"
