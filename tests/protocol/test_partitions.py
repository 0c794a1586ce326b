"""Partitions that are added, removed and emptied while the pipeline runs; most of this sends no event.

A partition tree is one target table. Its leaves are published and read; a leaf can also be captured alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psycopg
import pytest

from airflow_cdc_provider.engine.core.errors import CannotFollow
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

TREE = """
CREATE TABLE {t} (id int PRIMARY KEY, body text, n int) PARTITION BY RANGE (id);
CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES FROM (0) TO (100);
CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES FROM (100) TO (200);
INSERT INTO {t} SELECT i * 10, 'row ' || i, i FROM generate_series(1, 19) i
"""
OUTSIDE = """
CREATE TABLE {t}_3 (n int, gone int, body text, id int NOT NULL);
ALTER TABLE {t}_3 DROP gone;
INSERT INTO {t}_3 (id, body, n) VALUES (210, 'from outside', 1), (220, 'too', 2)
"""
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_3 FOR VALUES FROM (200) TO (300)"
KEY = "ALTER TABLE {t}_3 ADD PRIMARY KEY (id)"
DATA = ("UPDATE {t} SET body = body || '+' WHERE id % 20 = 0", "UPDATE {t} SET id = id + 1 WHERE id % 50 = 0")

CASES = {
    "created": [
        "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (200) TO (300)",
        "INSERT INTO {t} VALUES (250, 'x')",
    ],
    "attached": [OUTSIDE, KEY, ATTACH, "UPDATE {t} SET n = n + 1"],
    "written_before": [OUTSIDE, KEY, "UPDATE {t}_3 SET body = 'before'", ATTACH, "DELETE FROM {t} WHERE id = 220"],
    "detached": ["ALTER TABLE {t} DETACH PARTITION {t}_2", "UPDATE {t}_2 SET body = 'not ours'"],
    "detached_concurrently": ["ALTER TABLE {t} DETACH PARTITION {t}_2 CONCURRENTLY"],
    "there_and_back": [
        "ALTER TABLE {t} DETACH PARTITION {t}_2",
        "INSERT INTO {t}_2 VALUES (105, 'meanwhile')",
        "ALTER TABLE {t} ATTACH PARTITION {t}_2 FOR VALUES FROM (100) TO (200)",
    ],
    "dropped": ["DROP TABLE {t}_2"],
    "none_left": ["DROP TABLE {t}_1", "ALTER TABLE {t} DETACH PARTITION {t}_2"],
    "split": [
        "ALTER TABLE {t} DETACH PARTITION {t}_2",
        "CREATE TABLE {t}_2a PARTITION OF {t} FOR VALUES FROM (100) TO (150)",
        "CREATE TABLE {t}_2b PARTITION OF {t} FOR VALUES FROM (150) TO (200)",
        "INSERT INTO {t} SELECT * FROM {t}_2",
        "DROP TABLE {t}_2",
    ],
    "deeper": [
        "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (200) TO (300) PARTITION BY HASH (id)",
        "CREATE TABLE {t}_3a PARTITION OF {t}_3 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE {t}_3b PARTITION OF {t}_3 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "INSERT INTO {t} SELECT i, 'deep' FROM generate_series(203, 243, 5) i",
    ],
    "renamed": ['ALTER TABLE {t}_2 RENAME TO "{c} Two"', "INSERT INTO {t} VALUES (105, 'x')"],
    "truncated": ["TRUNCATE {t}", "INSERT INTO {t} VALUES (5, 'x'), (105, 'y')"],
    "leaf_truncated": ["TRUNCATE {t}_1", "INSERT INTO {t} VALUES (5, 'x'), (105, 'y')"],
    "column": [
        "ALTER TABLE {t} ADD b int DEFAULT 4",
        "INSERT INTO {t} VALUES (105, 'x', 1, 2)",
    ],
    "column_without_default_later": [
        "ALTER TABLE {t} ADD b int DEFAULT 4",
        "ALTER TABLE {t} ALTER b DROP DEFAULT",
        "INSERT INTO {t} VALUES (105, 'x', 1, 2)",
    ],
    "column_and_partition": [
        OUTSIDE,
        KEY,
        "ALTER TABLE {t}_3 ADD b int",
        "ALTER TABLE {t} ADD b int DEFAULT 4",
        ATTACH,
    ],
    "odd_order": [OUTSIDE, KEY, ATTACH, "ALTER TABLE {t} DROP n", "ALTER TABLE {t} ADD n text DEFAULT 'n'"],
    "key_type": ["ALTER TABLE {t} ALTER n TYPE bigint", "INSERT INTO {t} VALUES (105, 'x', 1 << 20)"],
}


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("data", ["data", "no data"])
def test_partitions(databases: Databases, tmp_path: Path, mode: Mode, data: str) -> None:
    """Each case has its own tree, and all of them run at once, between data."""
    pipeline = PipelineUnderTest(tmp_path, databases, [f"public.{case}" for case in CASES], sink={"mode": mode})

    def play(case: str, *statements: str) -> None:
        with psycopg.connect(databases.source, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.format(t=f"public.{case}", c=case).encode())

    for case in CASES:
        play(case, TREE)
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.apply()
    for case, statements in CASES.items():
        play(case, *(DATA if data == "data" else ()), *statements, *(DATA if data == "data" else ()))
    for _ in range(2):
        pipeline.apply()
        pipeline.assert_verified()
        for target in pipeline.record.targets:
            names = [column.name for column in target.table.columns]
            assert_same_values(pipeline, ["id"], names, "public", target.table.name)
        for case in CASES:
            play(case, *DATA)


@pytest.mark.parametrize(
    "statement",
    ["TRUNCATE public.p", "TRUNCATE public.p_2", "ALTER TABLE public.p DETACH PARTITION public.p_2"],
)
def test_a_partition_captured_by_itself(databases: Databases, tmp_path: Path, statement: str) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.p_2"])
    pipeline.source(TREE.format(t="public.p"))
    pipeline.provision()
    pipeline.copy(table="public.p_2")
    pipeline.source(
        "UPDATE public.p SET body = 'before'",
        "UPDATE public.p SET id = 55 WHERE id = 100",
        "UPDATE public.p SET id = 155 WHERE id = 50",
        statement,
        "INSERT INTO public.p_2 VALUES (101, 'after')",
        "ALTER TABLE public.p ADD b int DEFAULT 4" if "DETACH" not in statement else "SELECT",
        "INSERT INTO public.p_2 VALUES (102, 'after')",
    )
    pipeline.apply()
    pipeline.assert_equal("public.p_2")


def test_a_partition_captured_by_itself_is_dropped(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.p_1", "public.p_2"])
    pipeline.source(TREE.format(t="public.p"))
    pipeline.provision()
    pipeline.copy_tables()
    pipeline.source("UPDATE public.p SET body = 'last'")
    last = pipeline.source_rows("SELECT * FROM public.p_2 ORDER BY id")
    pipeline.source("DROP TABLE public.p_2", "UPDATE public.p SET n = 0")
    with pytest.raises(CannotFollow, match=r"public\.p_2 has been dropped"):
        pipeline.apply()
    assert pipeline.target_rows("SELECT * FROM public.p_2 ORDER BY id") == last
    pipeline.change(source={"tables": ["public.p_1"]})
    pipeline.provision()
    pipeline.apply()
    pipeline.assert_equal("public.p_1")


def test_tables_that_are_published_and_not_captured(databases: Databases, tmp_path: Path) -> None:
    """A DBA's publication may have more tables; a new partition of a captured tree is not one of those left out."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.p"])
    name = f'"{pipeline.pipeline.source.publication}"'
    pipeline.source(TREE.format(t="public.p"), "CREATE TABLE public.other (id int PRIMARY KEY)")
    pipeline.source(f"CREATE PUBLICATION {name} FOR ALL TABLES")
    pipeline.provision()
    pipeline.copy(table="public.p")
    pipeline.source(
        "INSERT INTO public.other VALUES (1)",
        "UPDATE public.p SET body = 'x'",
        "CREATE TABLE public.later (id int PRIMARY KEY)",
        "INSERT INTO public.later VALUES (1)",
        *(statement.format(t="public.p") for statement in CASES["created"]),
    )
    pipeline.apply()
    pipeline.assert_equal("public.p")
    pipeline.source("INSERT INTO public.p VALUES (251, 'y')", "TRUNCATE public.other, public.later")
    pipeline.apply()
    pipeline.assert_equal("public.p")
