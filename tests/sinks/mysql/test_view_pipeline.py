"""Views of a pipeline into MariaDB, from end to end: they move with changes, DDL and re-reads of the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.audited import AUDITED, writing
from tests.support.mysql import MysqlPipeline
from tests.support.sparkless import DONE, SparklessRun

pytestmark = pytest.mark.slow

WIDE = (
    "SELECT t.id, t.body, length(t.big) AS size, g.name FROM public.t LEFT JOIN public.g ON g.id = t.grp"
    " WHERE t.id % 7 <> 0"
)
NAMES = (
    "SELECT g.name, count(*) AS n, sum(length(t.body)) AS size FROM public.g JOIN public.t ON t.grp = g.id"
    " GROUP BY g.name"
)
VIEWS = {"dwd.wide": {"sql": WIDE, "max_rows": 60}, "dwd.names": {"sql": NAMES}}
GROUPED = (
    "CREATE TABLE public.g (id int PRIMARY KEY, name text)",
    "INSERT INTO public.g SELECT n, 'g' || n % 5 FROM generate_series(0, 29) n",
    "ALTER TABLE public.t ADD grp int DEFAULT 3",
    "UPDATE public.t SET grp = id % 31",
)


@pytest.fixture
def pipeline(databases: Databases, mariadb: MariadbServer, tmp_path: Path) -> Iterator[MysqlPipeline]:
    """Return a pipeline of two tables with two views."""
    under_test = MysqlPipeline(
        tmp_path,
        databases,
        mariadb,
        ["public.t", "public.g"],
        sink={"dsn": mariadb.dsn, "schema": "copy", "views": VIEWS},
        snapshot={"chunk_rows": 800},
        stream={"max_batch_bytes": "256KiB"},
    )
    under_test.source(AUDITED, *GROUPED)
    yield under_test
    under_test.end_commands()


def follow(pipeline: MysqlPipeline) -> None:
    """Run the pipeline until it has all changes."""
    run = SparklessRun(pipeline.file)
    assert (run.wait(), run.message) == (DONE, "")


def check(pipeline: MysqlPipeline) -> list[Any]:
    """Check that mirror and views are equal to what they are made from; return the views' results."""
    pipeline.apply()
    pipeline.assert_verified()
    found: list[Any] = commands.verify(pipeline.pipeline)["views"]
    assert [(view["view"], view["equal"]) for view in found] == [("dwd.names", True), ("dwd.wide", True)] or [
        (view["view"], view["equal"]) for view in found
    ] == [("dwd.wide", True), ("dwd.names", True)]
    assert all(not view["queued"] and not view["unbuilt"] for view in found)
    return found


def test_views_move_with_a_table_under_change(pipeline: MysqlPipeline) -> None:
    with writing(pipeline.databases.source):
        for _ in range(2):
            follow(pipeline)
    assert all(view["rows"] for view in check(pipeline))
    states = {view["view"]: view["state"] for view in commands.status(pipeline.pipeline)["views"]}
    assert states == dict.fromkeys(VIEWS, "up-to-date")


def test_views_follow_ddl_and_reads_of_whole_tables(pipeline: MysqlPipeline) -> None:
    follow(pipeline)
    check(pipeline)
    pipeline.source(
        "UPDATE public.g SET id = 100 WHERE id = 5",
        "ALTER TABLE public.g ADD note text DEFAULT 'none'",
        "ALTER TABLE public.t ALTER COLUMN body TYPE varchar(200) USING body || '!'",
        "UPDATE public.t SET grp = 100 WHERE id < 20",
    )
    follow(pipeline)
    assert all(view["rows"] for view in check(pipeline))
    pipeline.source("ALTER TABLE public.g RENAME COLUMN name TO title", "UPDATE public.g SET title = 'x' WHERE id < 9")
    titled = {name: {**view, "sql": view["sql"].replace("g.name", "g.title AS name")} for name, view in VIEWS.items()}
    titled["dwd.names"]["sql"] = NAMES.replace("SELECT g.name", "SELECT g.title AS name").replace(
        "BY g.name", "BY g.title"
    )
    pipeline.change(sink={"views": titled})
    follow(pipeline)
    check(pipeline)
    pipeline.source("TRUNCATE public.g")
    follow(pipeline)
    found = {view["view"]: view["rows"] for view in check(pipeline)}
    assert found["dwd.names"] == 0
    assert found["dwd.wide"] > 0
    pipeline.run("resnapshot", "--table", "public.t")
    follow(pipeline)
    check(pipeline)
