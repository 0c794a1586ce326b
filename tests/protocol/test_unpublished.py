"""Tables that a foreign publication loses for a while, without naming them: they are re-read.

The publication contains them by their schema or by their root, which a table can leave and rejoin; or it contains all
tables, and a table leaves it while it is unlogged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow
from tests.conftest import Databases, ServerMaker
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

TABLE = "CREATE TABLE shop.{t} (id int PRIMARY KEY, n int, body text)"
SHORT = "CREATE TABLE shop.{t} (id int PRIMARY KEY, n int)"  # has no TOAST table
KEYLESS = "CREATE TABLE shop.{t} (id int, n int); ALTER TABLE shop.{t} REPLICA IDENTITY FULL"
TREE = """
CREATE TABLE shop.{t} (id int PRIMARY KEY, n int, body text) PARTITION BY RANGE (id);
CREATE TABLE parts.{t}_1 PARTITION OF shop.{t} FOR VALUES FROM (0) TO (11);
CREATE TABLE parts.{t}_2 PARTITION OF shop.{t} FOR VALUES FROM (11) TO (1000)
"""
ROWS = "INSERT INTO shop.{t} (id, n) SELECT n, n FROM generate_series(1, 20) n"
MEANWHILE = (
    "UPDATE {t} SET n = -1 WHERE id = 2",
    "DELETE FROM {t} WHERE id = 3",
    "INSERT INTO {t} (id, n) VALUES (0, 0)",
)
DATA = (
    "UPDATE {t} SET n = n + 100 WHERE id > 5",
    "INSERT INTO {t} (id, n) SELECT coalesce(max(id), 0) + 1, 7 FROM {t}",
)


def gap(table: str, leave: str, come_back: str, elsewhere: str | None = None) -> list[str]:
    """Return statements that change a table while it is away."""
    change = [statement.replace("{t}", elsewhere or table) for statement in MEANWHILE]
    return [f"ALTER TABLE {leave}", *change, f"ALTER TABLE {come_back}"]


def unlogged(table: str) -> list[str]:
    return gap(table, f"{table} SET UNLOGGED", f"{table} SET LOGGED")


TRUNCATED = "TRUNCATE shop.{t}"
LOAD = "INSERT INTO shop.{t} (id, n) VALUES (2, 2), (3, 3)"
DETACHED = gap(
    "parts.{t}_1",
    "shop.{t} DETACH PARTITION parts.{t}_1",
    "shop.{t} ATTACH PARTITION parts.{t}_1 FOR VALUES FROM (0) TO (11)",
)
MOVED = gap("shop.{t}", "shop.{t} SET SCHEMA attic", "attic.{t} SET SCHEMA shop", "attic.{t}")
# Statements, and the table that they concern.
TREES_READ_AGAIN: Mapping[str, tuple[str, list[str]]] = {
    "detached": (TREE, DETACHED),
    "leaf_unlogged": (TREE, unlogged("parts.{t}_1")),
}
READ_AGAIN = TREES_READ_AGAIN | {
    "unlogged": (TABLE, unlogged("shop.{t}")),
    "unlogged_short": (SHORT, unlogged("shop.{t}")),
    "unlogged_keyless": (KEYLESS, unlogged("shop.{t}")),
    "unlogged_then_column": (TABLE, [*unlogged("shop.{t}"), "ALTER TABLE shop.{t} ADD more int DEFAULT 1"]),
    "loaded_unlogged": (SHORT, [TRUNCATED, LOAD, *unlogged("shop.{t}")]),
    "loaded_in_one": (SHORT, ["BEGIN; " + "; ".join([TRUNCATED, *unlogged("shop.{t}"), LOAD]) + "; COMMIT"]),
    "loaded_in_one_touched": (
        SHORT,
        [
            "BEGIN; " + "; ".join([TRUNCATED, *unlogged("shop.{t}"), LOAD]) + "; COMMIT",
            "BEGIN; GRANT SELECT ON shop.{t} TO PUBLIC; ROLLBACK",
        ],
    ),
    "moved": (TABLE, MOVED),
}
TREES_FOLLOWED: Mapping[str, tuple[str, list[str]]] = {
    "leaf_vacuumed": (TREE, ["VACUUM FULL parts.{t}_1"]),
    "leaf_renamed": (TREE, ["ALTER TABLE parts.{t}_1 RENAME TO {t}_one"]),
    "tree_analyzed": (TREE, ["ANALYZE shop.{t}", "VACUUM FREEZE parts.{t}_1"]),
}
FOLLOWED = TREES_FOLLOWED | {
    "vacuumed": (TABLE, ["VACUUM FULL shop.{t}", "CLUSTER shop.{t} USING {t}_pkey"]),
    "frozen": (SHORT, ["VACUUM FREEZE shop.{t}", "ANALYZE shop.{t}"]),
    "truncated": (TABLE, ["BEGIN; LOCK shop.{t}; DELETE FROM shop.{t}; TRUNCATE shop.{t}; COMMIT", LOAD]),
    "truncated_short": (SHORT, [TRUNCATED, LOAD, TRUNCATED, "ANALYZE shop.{t}"]),
    "column": (SHORT, ["ALTER TABLE shop.{t} ADD body text DEFAULT 'x'"]),
    "renamed": (TABLE, ["ALTER TABLE shop.{t} RENAME TO {t}_2", "ALTER TABLE shop.{t}_2 RENAME TO {t}"]),
    "granted": (TABLE, ["GRANT SELECT ON shop.{t} TO PUBLIC", "ALTER TABLE shop.{t} SET (fillfactor = 50)"]),
}
CATALOGS = [f"VACUUM {how} pg_catalog.{table}" for how in ("FULL", "FREEZE") for table in ("pg_depend", "pg_inherits")]


class Tables(PipelineUnderTest):
    """A pipeline that streams one table of the schema ``shop`` per case, in a foreign publication."""

    def __init__(
        self, directory: Path, databases: Databases, published: str, cases: Mapping[str, str], name: str | None = None
    ) -> None:
        self.cases = list(cases)
        sections = {"pipeline": name} if name else {}
        super().__init__(directory, databases, [f"shop.{case}" for case in cases], **sections)
        self.source("CREATE SCHEMA shop", "CREATE SCHEMA parts", "CREATE SCHEMA attic")
        for case, table in cases.items():
            self.play(case, table, ROWS)
        publication = self.pipeline.source.publication
        self.source(f"CREATE PUBLICATION {publication} FOR {published.format(', '.join(f'shop.{c}' for c in cases))}")
        self.provision()
        self.copy_tables()
        self.apply()

    def play(self, case: str, *statements: str) -> None:
        """Execute statements for the table of a case."""
        self.source(*(statement.format(t=case) for statement in statements))

    def write(self) -> None:
        """Change rows of all tables."""
        for case in self.cases:
            self.play(case, *(statement.replace("{t}", "shop.{t}") for statement in DATA))

    def reads(self) -> dict[str, int]:
        """Return H of the last full read of each table."""
        return {c.chunk.table.removeprefix("shop."): c.watermark.high for c in self.record.chunks if c.watermark}

    def assert_same(self) -> None:
        for case in self.cases:
            self.assert_equal(f"shop.{case}")


def assert_read_again(pipeline: Tables, done: Mapping[str, Sequence[str]], again: set[str]) -> None:
    """Run the statements on the tables, between changes, and check which tables are re-read, once."""
    before = pipeline.reads()
    pipeline.write()
    for case, statements in done.items():
        pipeline.play(case, *statements)
    pipeline.source(*CATALOGS)
    pipeline.write()
    for _ in range(2):
        pipeline.apply()
        pipeline.assert_same()
        after = pipeline.reads()
        assert {case for case in done if after[case] != before[case]} == again
        before = before | {case: after[case] for case in again}
        again = set()
        pipeline.write()


def scripts(cases: Mapping[str, tuple[str, list[str]]]) -> dict[str, list[str]]:
    return {case: statements for case, (_, statements) in cases.items()}


def kinds(cases: Mapping[str, tuple[str, list[str]]]) -> dict[str, str]:
    return {case: table for case, (table, _) in cases.items()}


@pytest.mark.parametrize("published", ["ALL TABLES", "TABLES IN SCHEMA shop", "TABLE {}"])
def test_tables_that_nothing_names(databases: Databases, tmp_path: Path, published: str) -> None:
    """Postgres forbids unlogging tables that the publication names, but not their partitions."""
    trees = published.startswith("TABLE ")
    again, followed = (TREES_READ_AGAIN, TREES_FOLLOWED) if trees else (READ_AGAIN, FOLLOWED)
    pipeline = Tables(tmp_path, databases, published, kinds(again | followed))
    assert_read_again(pipeline, scripts(again | followed), set(again))


@pytest.mark.parametrize("version", ["18", "the system's"])
def test_on_other_servers(
    databases: Databases, tmp_path: Path, make_server: ServerMaker, request: pytest.FixtureRequest, version: str
) -> None:
    binaries = None if version == "18" else request.getfixturevalue("system_binaries")
    pair = Databases(make_server("18", binaries=binaries).dsn(), databases.target)
    cases = READ_AGAIN | FOLLOWED
    pipeline = Tables(tmp_path, pair, "TABLES IN SCHEMA shop", kinds(cases), "unpublished")
    assert_read_again(pipeline, scripts(cases), set(READ_AGAIN))


def test_tables_that_the_publication_names(databases: Databases, tmp_path: Path) -> None:
    """They stay in it wherever they move. For rows that were changed elsewhere, the log shows where."""
    moved = ["ALTER TABLE shop.{t} SET SCHEMA attic", "ALTER TABLE attic.{t} SET SCHEMA shop"]
    cases = {"moved": (TABLE, moved), "vacuumed_short": (SHORT, ["VACUUM FULL shop.{t}"])}
    pipeline = Tables(tmp_path, databases, "TABLE {}", kinds(cases))
    assert_read_again(pipeline, scripts(cases), set())


# What is seen of a table while it is away, and what the refusal says to do.
SEEN = {
    "unlogged": ("is unlogged", ["ALTER TABLE shop.t SET LOGGED"]),
    "moved": ("renamed attic.t", ["ALTER TABLE attic.t SET SCHEMA shop"]),
}


@pytest.mark.parametrize("case", SEEN)
def test_what_is_refused_meanwhile_and_put_back(databases: Databases, tmp_path: Path, case: str) -> None:
    table, (*away, _) = READ_AGAIN[case]
    words, back = SEEN[case]
    pipeline = Tables(tmp_path, databases, "TABLES IN SCHEMA shop", {"t": table})
    pipeline.play("t", *away)
    for _ in range(2):
        with pytest.raises(CannotFollow, match=words):
            pipeline.apply()
    pipeline.source(*back)
    pipeline.write()
    pipeline.apply()
    pipeline.assert_same()


@pytest.mark.parametrize("again", [False, True])
def test_a_record_that_does_not_know_yet(databases: Databases, tmp_path: Path, again: bool) -> None:
    """It is accepted as it is, and completed; a refusal's remedy does not need it."""
    cases = {case: READ_AGAIN[case][0] for case in ("unlogged", "unlogged_short", "detached", "moved")}
    pipeline = Tables(tmp_path, databases, "TABLES IN SCHEMA shop", cases)
    forget = (
        "UPDATE airflow_cdc.tables SET definition = jsonb_set(definition::jsonb, '{leaves}', (SELECT"
        " jsonb_agg(l - 'toast' - 'place' - 'streamed') FROM jsonb_array_elements(definition::jsonb -> 'leaves') l))"
    )
    pipeline.target(forget)
    before = pipeline.reads()
    if again:
        pipeline.play("unlogged", *READ_AGAIN["unlogged"][1][:-1])
        with pytest.raises(CannotFollow, match="is unlogged") as refusal:
            pipeline.apply()
        assert "`airflow-cdc resnapshot --table 'shop.unlogged'`" in refusal.value.solution
        pipeline.source("ALTER TABLE shop.unlogged SET LOGGED")
        commands.resnapshot(pipeline.pipeline, tables=["shop.unlogged"])
        pipeline.apply()
        pipeline.assert_same()
        return
    pipeline.source("VACUUM FULL shop.unlogged_short")
    pipeline.apply()
    assert pipeline.reads() == before
    assert_read_again(pipeline, scripts({case: READ_AGAIN[case] for case in cases}), set(cases))
