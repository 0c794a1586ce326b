"""Sessions that only read cannot be made to write, and row-level security is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg2
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, MissingPrivilege, Retry
from airflow_cdc_provider.engine.postgres.connection import connected, rows
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import plan
from airflow_cdc_provider.engine.sources.postgres.reading.read_sessions import ArrowSession, CopySession
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

# An owner of a table could put it into a policy, an index or an operator, which run as the role that reads.
TRAP = """
CREATE TABLE public.trapped (who text);
GRANT INSERT, SELECT ON public.trapped TO PUBLIC;
CREATE FUNCTION public.trap(int) RETURNS bool LANGUAGE sql VOLATILE AS
$$ INSERT INTO public.trapped VALUES (current_user); SELECT true $$;
"""
HIDING = (
    "CREATE POLICY hiding ON {0} USING (id > 1)",
    "ALTER TABLE {0} ENABLE ROW LEVEL SECURITY",
    # The pipeline's role owns the table, as a member.
    "ALTER TABLE {0} FORCE ROW LEVEL SECURITY",
)


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """Return a pipeline whose table is copied."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"schema": "copy"})
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, v text)", "INSERT INTO public.t VALUES (1, 'a'), (2, 'b')"
    )
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    return pipeline


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_condition_cannot_write(pipeline: PipelineUnderTest, side: str) -> None:
    """This holds for reads of rows in the source and in the sink."""
    getattr(pipeline, side)(*filter(str.strip, TRAP.split(";\n")))
    other = pipeline.source if side == "target" else pipeline.target
    other("CREATE FUNCTION public.trap(int) RETURNS bool LANGUAGE sql AS 'SELECT true'")
    with pytest.raises(ConfigError, match="read-only transaction"):
        commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="public.trap(id)")
    look = pipeline.source_rows if side == "source" else pipeline.target_rows
    assert look("SELECT * FROM public.trapped") == []


@pytest.mark.parametrize("session", [ArrowSession, CopySession])
def test_a_reading_session_cannot_write(
    databases: Databases, session: Callable[..., ArrowSession | CopySession]
) -> None:
    reading = session(databases.source, {})
    try:
        with pytest.raises(Exception, match="read-only transaction"):
            reading.execute("CREATE TABLE public.made (id int)")
    finally:
        reading.close()


def test_only_who_says_so_writes(databases: Databases) -> None:
    with connected(databases.source) as source, pytest.raises(psycopg2.errors.ReadOnlySqlTransaction):
        rows(source, "CREATE TABLE public.made (id int)")
    with connected(databases.source, writes=True) as source:
        rows(source, "CREATE TABLE public.made (id int)")


def _require_told(error: CdcError) -> None:
    assert "row-level security" in error.message
    assert "BYPASSRLS" in error.solution
    assert error.retry is Retry.FAIL


def test_a_policy_on_a_captured_table(pipeline: PipelineUnderTest) -> None:
    """The policy is created after the table is captured: the next read fails instead of missing rows."""
    pipeline.source(*(statement.format("public.t") for statement in HIDING))
    loaded = pipeline.pipeline
    with connected(loaded.source.dsn) as source:
        (table,) = resolve(source, loaded.source.tables)
        with pytest.raises(MissingPrivilege) as planning:
            plan(source, table, 1)
    with pytest.raises(MissingPrivilege) as some:
        commands.resnapshot(loaded, tables=["public.t"], where="id > 0")
    with pytest.raises(MissingPrivilege) as whole:
        commands.resnapshot(loaded, tables=["public.t"])
    with pytest.raises(MissingPrivilege) as comparing:
        commands.verify(loaded)
    for failed in (planning, some, whole, comparing):
        _require_told(failed.value)
    pipeline.source("ALTER TABLE public.t NO FORCE ROW LEVEL SECURITY")
    pipeline.assert_verified()


def test_a_policy_on_a_target_table(pipeline: PipelineUnderTest) -> None:
    """It would hide rows from updates."""
    pipeline.target(*(statement.format("copy.t") for statement in HIDING))
    with pytest.raises(MissingPrivilege) as some:
        commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id > 0")
    with pytest.raises(MissingPrivilege) as comparing:
        commands.verify(pipeline.pipeline)
    pipeline.source("UPDATE public.t SET v = 'c'")
    with pytest.raises(CdcError) as applying:
        pipeline.apply()
    for failed in (some, comparing, applying):
        _require_told(failed.value)
    pipeline.target("ALTER TABLE copy.t NO FORCE ROW LEVEL SECURITY")
    pipeline.apply()
    pipeline.assert_verified()
