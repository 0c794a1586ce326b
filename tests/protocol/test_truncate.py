"""TRUNCATE before, between and after the chunks' reads, alone and among other changes, of one table and of several.

Each statement runs on separate tables at each moment, all in one pipeline, so that units contain many at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from airflow_cdc_provider.engine import commands
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.databases import execute, transaction
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

MOMENTS = range(4)  # before the chunks, between them, after them in the first unit, and in the next unit
NEW = "INSERT INTO {0} (id, n, v) SELECT n, 1, rpad('new', 2100, n::text) FROM generate_series(3, 6) n"
FILL = "INSERT INTO {0} (id, n, v) SELECT n, 0, rpad(n::text, 2100, n::text) FROM generate_series(1, 8) n"

# A list is a transaction. {a} is a table, {b} refers to {a}, {c} is unrelated.
STATEMENTS: dict[str, list[list[str]]] = {
    "alone": [["TRUNCATE {a}, {b}"]],
    "cascade": [["TRUNCATE {a} CASCADE"]],
    "restart identity": [["TRUNCATE {c} RESTART IDENTITY"], ["INSERT INTO {c} (n, v) VALUES (5, 'first again')"]],
    "several": [["TRUNCATE {a}, {c}, {b} RESTART IDENTITY CASCADE"]],
    "twice": [
        ["TRUNCATE {c}"],
        ["INSERT INTO {c} (id, n, v) VALUES (4, 4, 'lost'), (50, 4, 'lost')"],
        ["TRUNCATE {c}"],
    ],
    "twice in one": [["TRUNCATE {c}", "INSERT INTO {c} (id, n, v) VALUES (4, 4, 'lost')", "TRUNCATE {c}"]],
    "changes before": [["UPDATE {c} SET n = 7", "UPDATE {c} SET id = id + 100 WHERE id > 5", "TRUNCATE {c}"]],
    "changes after": [
        ["TRUNCATE {c}", NEW.format("{c}"), "UPDATE {c} SET n = 8", "UPDATE {c} SET id = -id WHERE id > 4"]
    ],
    "changes of others": [
        [
            "UPDATE {c} SET n = 9",
            "TRUNCATE {a} CASCADE",
            "UPDATE {c} SET id = id + 100 WHERE n = 9 AND id > 6",
            "DELETE FROM {c} WHERE id < 3",
        ],
        ["UPDATE {c} SET n = n + 1"],
        ["INSERT INTO {b} (id, n, v) VALUES (2, 1, 'after')", "INSERT INTO {a} (id, n, v) VALUES (2, 2, 'after')"],
    ],
    "other transactions": [
        ["INSERT INTO {c} (id, n, v) VALUES (40, 1, 'lost')"],
        ["TRUNCATE {c}"],
        [NEW.format("{c}")],
        ["UPDATE {c} SET n = 3 WHERE id = 4", "DELETE FROM {c} WHERE id = 5"],
    ],
    "taken back": [["SAVEPOINT s", "TRUNCATE {a}, {b}, {c}", "ROLLBACK TO s", "UPDATE {c} SET n = 4"]],
    "emptied by hand": [["DELETE FROM {c}"], ["TRUNCATE {c}"], ["TRUNCATE {c}"], [NEW.format("{c}")]],
}


def tables_of(what: int, moment: int) -> dict[str, str]:
    """Return the tables of a statement at a moment: those that it names, and those that refer to them."""
    text = str(list(STATEMENTS.values())[what])
    used = "abc" if "{c}" in text and "{a}" in text else "ab" if "{a}" in text else "c"
    return {name: f"{name}{what}_{moment}" for name in used}


def happen(dsn: str, moment: int) -> None:
    """Execute everything that belongs to a moment."""
    for what, transactions in enumerate(STATEMENTS.values()):
        names = tables_of(what, moment)
        for statements in transactions:
            with transaction(dsn, *(statement.format(**names) for statement in statements)) as open_:
                open_.commit()


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_every_truncate_at_every_moment(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": mode}, snapshot={"chunk_rows": 4})
    create = []
    for what in range(len(STATEMENTS)):
        for moment in MOMENTS:
            names = tables_of(what, moment)
            for name in names.values():
                create.append(f"CREATE TABLE {name} (id serial PRIMARY KEY, n int, v text)")
                create.append(f"ALTER TABLE {name} ALTER v SET STORAGE EXTERNAL")
                create.append(FILL.format(name))
            if "b" in names:
                reference = "ALTER TABLE {b} ADD FOREIGN KEY (id) REFERENCES {a} DEFERRABLE INITIALLY DEFERRED"
                create.append(reference.format(**names))
    execute(databases.source, "; ".join(create))
    pipeline.provision()
    assert {chunk.chunk.index for chunk in pipeline.record.chunks} == {0, 1}
    happen(databases.source, 0)
    pipeline.copy_tables(0)
    happen(databases.source, 1)
    pipeline.copy_tables(1)
    for moment in (2, 3):
        happen(databases.source, moment)
        pipeline.apply()
        pipeline.assert_verified()
    for target in pipeline.record.targets:
        assert_same_values(pipeline, ["id"], ["id", "n", "v"], "public", target.table.name)


TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
VALUE = "(SELECT string_agg(md5(n || '.' || i), '') FROM generate_series(1, 260) i)"  # too large for its row


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_a_truncate_that_a_re_read_of_keys_has_seen(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    """The re-read row was inserted after it; all other rows have to go."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode})
    pipeline.source(TABLE, "INSERT INTO public.t SELECT n, 'old' FROM generate_series(1, 20) n")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source("TRUNCATE public.t", "INSERT INTO public.t VALUES (1, 'new'), (2, 'new')")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id = 1")
    pipeline.apply()
    pipeline.assert_verified()


def test_a_truncate_that_a_re_read_of_large_values_has_seen(databases: Databases, tmp_path: Path) -> None:
    """As with a request, but the stream requests the row: it starts to match the rule without its large value."""
    rule = {"table": "public.t", "where": "id > 0"}
    pipeline = PipelineUnderTest(tmp_path, databases, [rule], stream={"max_batch_bytes": "16KiB"})  # several units
    pipeline.source(TABLE, f"INSERT INTO public.t SELECT n, {VALUE} FROM generate_series(-5, 20) n")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    more = f"INSERT INTO public.t SELECT n, {VALUE} FROM generate_series(200, 220) n"
    pipeline.source("UPDATE public.t SET id = 100 WHERE id = -3", more, "TRUNCATE public.t")
    pipeline.apply()
    pipeline.assert_verified()
