"""What the page about views says of changed definitions, changed tables and removed views, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = pytest.mark.slow

SHOP = (
    "CREATE TABLE public.customers (id int PRIMARY KEY, city text, note text)",
    "CREATE TABLE public.orders (id int PRIMARY KEY, customer int, total numeric, priority int DEFAULT 1)",
    "INSERT INTO public.customers SELECT n, 'City ' || n % 3 FROM generate_series(1, 9) n",
    "INSERT INTO public.orders SELECT n, n % 12, n FROM generate_series(1, 60) n",
)
JOIN = "FROM public.orders o LEFT JOIN public.customers c ON c.id = o.customer"
WIDE = f"SELECT o.id, o.total, o.priority, c.city {JOIN}"


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    """Return a pipeline whose view is built."""
    made = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"schema": "copy"})
    made.source(*SHOP)
    define(made, WIDE)
    run(made)
    yield made
    made.end_commands()


def define(pipeline: PipelineUnderTest, select: str, **settings: Any) -> None:
    pipeline.change(sink={"views": {"dwd.wide": {"sql": select, **settings}}})


def run(pipeline: PipelineUnderTest) -> None:
    ended = SparklessRun(pipeline.file)
    assert (ended.wait(), ended.message) == (DONE, "")


def refused(pipeline: PipelineUnderTest) -> str:
    ended = SparklessRun(pipeline.file)
    assert ended.wait() == FAILED
    return ended.message


def assert_equal(pipeline: PipelineUnderTest, select: str) -> None:
    wanted = pipeline.source_rows(f"SELECT * FROM ({select}) s ORDER BY 1")
    assert wanted
    assert pipeline.target_rows("SELECT * FROM dwd.wide ORDER BY 1") == wanted
    assert commands.verify(pipeline.pipeline)["equal"] is True


def test_a_changed_definition_keeps_grants(pipeline: PipelineUnderTest) -> None:
    pipeline.target("GRANT SELECT ON dwd.wide TO PUBLIC")
    define(pipeline, f"SELECT o.id, c.city, o.total * 2 AS twice {JOIN} WHERE o.total > 5")
    run(pipeline)

    assert_equal(pipeline, f"SELECT o.id, c.city, o.total * 2 AS twice {JOIN} WHERE o.total > 5")
    assert pipeline.target_rows("SELECT relacl::text LIKE '%=r/%' FROM pg_class WHERE oid = 'dwd.wide'::regclass")[0][0]


def test_a_table_that_an_sql_view_uses_is_not_exchanged(pipeline: PipelineUnderTest) -> None:
    pipeline.target("CREATE VIEW copy.report AS SELECT count(*) AS n FROM dwd.wide")
    define(pipeline, f"SELECT o.id, c.city {JOIN}")

    assert "dwd.wide" in refused(pipeline)
    pipeline.target("DROP VIEW copy.report")
    run(pipeline)
    assert_equal(pipeline, f"SELECT o.id, c.city {JOIN}")


def test_columns_that_the_view_does_not_read_may_change(pipeline: PipelineUnderTest) -> None:
    pipeline.source(
        "ALTER TABLE public.customers DROP COLUMN note",
        "ALTER TABLE public.customers ADD COLUMN age int",
        "UPDATE public.customers SET city = 'Oslo', age = 7 WHERE id = 2",
    )
    run(pipeline)
    assert_equal(pipeline, WIDE)


def test_a_column_of_another_type_builds_the_view_again(pipeline: PipelineUnderTest) -> None:
    pipeline.source(
        "ALTER TABLE public.orders ALTER COLUMN priority TYPE bigint",
        "UPDATE public.orders SET priority = 3000000000 WHERE id = 2",
    )
    run(pipeline)
    assert_equal(pipeline, WIDE)


@pytest.mark.parametrize("beforehand", [True, False])
def test_a_renamed_column_needs_another_definition(pipeline: PipelineUnderTest, beforehand: bool) -> None:
    renamed = WIDE.replace("c.city", "c.town AS city")
    if beforehand:
        define(pipeline, renamed)
        run(pipeline)
        assert_equal(pipeline, WIDE)
    pipeline.source(
        "UPDATE public.orders SET total = total + 1",
        "ALTER TABLE public.customers RENAME COLUMN city TO town",
        "UPDATE public.customers SET town = 'Oslo' WHERE id = 2",
    )
    if not beforehand:
        message = refused(pipeline)
        assert message.startswith("CannotFollow")
        assert "dwd.wide" in message
        define(pipeline, renamed)
    run(pipeline)
    assert_equal(pipeline, renamed)


def test_a_dropped_column_stops_the_stream_before_the_change(pipeline: PipelineUnderTest) -> None:
    pipeline.source("UPDATE public.customers SET city = 'Oslo' WHERE id = 2")
    pipeline.source("ALTER TABLE public.customers DROP COLUMN city")

    assert "dwd.wide" in refused(pipeline)
    assert pipeline.target_rows("SELECT count(*) FROM dwd.wide WHERE city = 'Oslo'") == [(5,)]
    define(pipeline, f"SELECT o.id, c.id AS customer {JOIN}")
    run(pipeline)
    assert_equal(pipeline, f"SELECT o.id, c.id AS customer {JOIN}")


def test_truncate_and_many_anchors_are_queued_and_drained(pipeline: PipelineUnderTest) -> None:
    define(pipeline, WIDE, max_rows=10)
    pipeline.source("UPDATE public.orders SET total = total + 1", "TRUNCATE public.customers")
    run(pipeline)
    assert_equal(pipeline, WIDE)


def test_a_value_that_cannot_be_computed_stops_the_stream(pipeline: PipelineUnderTest) -> None:
    define(pipeline, f"SELECT o.id, 1 / o.priority AS share {JOIN}")
    run(pipeline)
    pipeline.source("UPDATE public.orders SET priority = 0 WHERE id = 2")

    assert refused(pipeline).startswith("ViewRefused")
    define(pipeline, f"SELECT o.id, 1 / nullif(o.priority, 0) AS share {JOIN}")
    run(pipeline)
    assert_equal(pipeline, f"SELECT o.id, 1 / nullif(o.priority, 0) AS share {JOIN}")


def test_a_removed_view_stays_until_it_is_dropped(pipeline: PipelineUnderTest) -> None:
    pipeline.document["sink"].pop("views")
    pipeline.change()
    pipeline.source("UPDATE public.customers SET city = 'Oslo'")
    run(pipeline)

    assert pipeline.target_rows("SELECT count(*) FROM dwd.wide WHERE city = 'Oslo'") == [(0,)]
    assert commands.drop_views(pipeline.pipeline) == {"views": ["dwd.wide"]}
    assert pipeline.target_rows("SELECT to_regclass('dwd.wide')") == [(None,)]
