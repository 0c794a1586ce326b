"""Publications of another owner, with more columns than are captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from tests.conftest import Databases, ServerMaker
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

VALUE = "(SELECT string_agg(md5(n || '.' || i), '') FROM generate_series(1, 260) i)"  # too large for its row
EVENTS = "SELECT _op::text, id, body FROM public.t WHERE _op <> 'r' ORDER BY _commit_lsn, _seq"


def assert_followed(pipeline: PipelineUnderTest, *statements: str) -> None:
    """Check that columns beyond the captured ones stop nothing, and cause no re-read."""
    commands.preflight(pipeline.pipeline)
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET body = 'new' WHERE id = 3", *statements, "DELETE FROM public.t WHERE id = 4")
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.target_rows(EVENTS) == [("u", 3, "new"), ("d", 4, None)]


@pytest.mark.parametrize("published", ["ALL TABLES", "TABLE public.t"])
def test_columns_that_the_rule_does_not_choose(databases: Databases, tmp_path: Path, published: str) -> None:
    """They lie between the chosen ones, and one is too large to be sent again."""
    rule = {"table": "public.t", "columns": ["id", "body"]}
    pipeline = PipelineUnderTest(tmp_path, databases, [rule], sink={"mode": "changelog"})
    pipeline.source(
        "CREATE TABLE public.t (large text, id int PRIMARY KEY, more int, body text)",
        f"INSERT INTO public.t SELECT {VALUE}, n, n, 'old' FROM generate_series(1, 20) n",
        f"CREATE PUBLICATION {pipeline.pipeline.source.publication} FOR {published}",
    )
    assert_followed(pipeline, "ALTER TABLE public.t RENAME more TO other")


def test_a_rule_that_chooses_fewer_columns_than_before(databases: Databases, tmp_path: Path) -> None:
    """The publication of another owner still has them, and need not be changed."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    name = pipeline.pipeline.source.publication
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, more int, body text)",
        "INSERT INTO public.t SELECT n, n, 'old' FROM generate_series(1, 20) n",
        f"CREATE PUBLICATION {name} FOR TABLE public.t",
        f"ALTER PUBLICATION {name} OWNER TO postgres",
    )
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.change(source={"tables": [{"table": "public.t", "columns": ["id", "body"]}]})
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    high = pipeline.record.high
    pipeline.source("UPDATE public.t SET body = 'new' WHERE id = 3")
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.record.high == high


def test_generated_columns(databases: Databases, make_server: ServerMaker, tmp_path: Path) -> None:
    pair = Databases(make_server("18").dsn(), databases.target)
    pipeline = PipelineUnderTest(tmp_path, pair, ["public.t"], pipeline="generated", sink={"mode": "changelog"})
    name = pipeline.pipeline.source.publication
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (2 * id) STORED, body text)",
        "INSERT INTO public.t SELECT n FROM generate_series(1, 20) n",
        f"CREATE PUBLICATION {name} FOR TABLE public.t WITH (publish_generated_columns = stored)",
    )
    assert_followed(pipeline)
