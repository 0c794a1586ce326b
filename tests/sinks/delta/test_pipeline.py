"""Pipelines into Delta tables, from real servers: snapshot, stream, DDL and re-reads, crashes, comparison."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import Failpoint, UncapturableTable
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from tests.conftest import Databases
from tests.support.audited import AUDITED, BIG, writing
from tests.support.delta_spark import delta_session
from tests.support.pipelines import PipelineUnderTest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TYPES = {
    "bool": "t",
    "int2": "-32768",
    "int4": "7",
    "int8": "9223372036854775807",
    "float4": "0.1",
    "float8": "-0",
    "numeric(20,5)": "1.50000",
    "numeric": "1e1000",
    "text": "\\N ü",
    "char(5)": "a",
    "bytea": "\\x00ff",
    "date": "0001-01-01",
    "timestamp": "2021-03-04 05:06:07.8",
    "timestamptz": "2021-10-31 02:30:00.000001+02",
    "time": "24:00",
    "interval": "1 mon -2 days 03:04:05.678901",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "jsonb": '{"a": [1, null]}',
    "int4[]": "{1,NULL}",
    "inet": "::1",
    "int4range": "[1,3)",
    "bit(3)": "101",
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


def pipeline_of(
    directory: Path, databases: Databases, tables: list[str], mode: str = "mirror", **sink: Any
) -> PipelineUnderTest:
    pipeline = PipelineUnderTest(directory, databases, tables, snapshot={"chunk_rows": 800})
    pipeline.change(sink=None)
    pipeline.change(sink={"type": "delta", "path": str(directory / "lake"), "mode": mode, **sink})
    return pipeline


def rows(spark: SparkSession, pipeline: PipelineUnderTest, query: str) -> list[tuple[Any, ...]]:
    """Return the result of a query, in which ``{name}`` stands for a target table."""

    class Tables(dict[str, str]):
        def __missing__(self, name: str) -> str:
            return f"delta.`{pipeline.directory}/lake/public/{name}`"

    return [tuple(row) for row in spark.sql(query.format_map(Tables())).collect()]


def assert_verified(pipeline: PipelineUnderTest) -> None:
    found = commands.verify(pipeline.pipeline)
    assert found["equal"], found["tables"]


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_all_types_come_through_snapshot_and_stream(
    spark: SparkSession, databases: Databases, tmp_path: Path, mode: str
) -> None:
    columns = ", ".join(f'"{kind}" {kind}' for kind in TYPES)
    values = ", ".join(f"'{value}'" for value in TYPES.values())
    pipeline = pipeline_of(tmp_path, databases, ["public.t"], mode)

    def insert(big: str, first: int, last: int) -> str:
        return f"INSERT INTO public.t SELECT n, {big}, {values} FROM generate_series({first}, {last}) n"

    pipeline.source(f"CREATE TABLE public.t (id int PRIMARY KEY, big text, {columns})", insert(BIG.format("n"), 1, 3))
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        insert("NULL", 4, 5),
        "INSERT INTO public.t (id) VALUES (6)",
        "UPDATE public.t SET int4 = 8 WHERE id = 1",
        "UPDATE public.t SET id = 12 WHERE id = 2",
        "DELETE FROM public.t WHERE id = 3",
        "UPDATE public.t SET id = 13 WHERE id = 12",
    )
    pipeline.apply()
    assert_verified(pipeline)
    if mode == "mirror":
        assert rows(spark, pipeline, "SELECT id, length(big) FROM {t} ORDER BY id") == [
            (1, 32 * 260),
            *[(4, None), (5, None), (6, None), (13, 32 * 260)],
        ]
        pipeline.source("TRUNCATE public.t", "INSERT INTO public.t (id) VALUES (99)")
        pipeline.apply()
        assert_verified(pipeline)
        assert rows(spark, pipeline, "SELECT id FROM {t}") == [(99,)]
    else:
        counts = "SELECT _op, count(*) FROM {t} GROUP BY 1 ORDER BY 1"
        assert rows(spark, pipeline, counts) == [("d", 1), ("i", 3), ("r", 3), ("u", 3)]


@pytest.fixture
def catalog(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """Use Spark's own catalog, whose tables are the folders that path tables would be."""
    spark.sql(f"CREATE SCHEMA public LOCATION '{tmp_path}/lake/public'")
    yield "spark_catalog"
    spark.sql("DROP SCHEMA public CASCADE")


def test_ddl_is_followed_and_tables_are_read_again(
    spark: SparkSession, databases: Databases, tmp_path: Path, catalog: str
) -> None:
    pipeline = pipeline_of(tmp_path, databases, ["public.t"], catalog=catalog)
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, a text, b int, n numeric(5,2))",
        "INSERT INTO public.t VALUES (1, 'x', 5, 1), (2, 'y', 6, 2)",
    )
    pipeline.provision()
    pipeline.copy()
    pipeline.source(
        "ALTER TABLE public.t ADD COLUMN c int DEFAULT 7, ADD COLUMN d timestamp",
        "UPDATE public.t SET b = 8 WHERE id = 1",
    )
    pipeline.apply()
    assert_verified(pipeline)
    pipeline.source("ALTER TABLE public.t RENAME COLUMN a TO a2", "UPDATE public.t SET b = 9 WHERE id = 1")
    pipeline.apply()
    pipeline.source("ALTER TABLE public.t DROP COLUMN d", "UPDATE public.t SET b = 10 WHERE id = 1")
    pipeline.apply()
    pipeline.source("ALTER TABLE public.t ALTER n TYPE numeric(8,2)", "UPDATE public.t SET n = 123456 WHERE id = 1")
    pipeline.apply()
    assert_verified(pipeline)
    assert writes(spark, pipeline) == 1
    # If no type change can follow it, the table is re-read, in one commit with its columns.
    pipeline.source("ALTER TABLE public.t ALTER b TYPE text USING 'b' || b", "INSERT INTO public.t VALUES (3, 'z')")
    pipeline.apply()
    assert_verified(pipeline)
    assert rows(spark, pipeline, "SELECT id, a2, b, c FROM {t} ORDER BY 1") == [
        *[(1, "x", "b10", 7), (2, "y", "b6", 7), (3, "z", None, 7)]
    ]
    pipeline.source("INSERT INTO public.t VALUES (4, 'w')")
    rows(spark, pipeline, "DELETE FROM {t} WHERE id < 3")
    commands.resnapshot(pipeline.pipeline, tables=["public.t"], where="id <= 2")
    pipeline.apply()
    assert_verified(pipeline)
    assert spark.catalog.tableExists("spark_catalog.public.t")


# Where a unit, or its entry in the log, can break off; steps of chunks are tested with the sink.
PLACES = (
    *("before-batch-staged", "after-batch-staged", "before-batch-commit", "in-batch-commit", "before-entry"),
    *("after-entry", "before-step", "before-table-written", "after-table-written", "after-step", "after-batch-commit"),
)
# Where a re-read and a change of schema can also break off: undecided, decided, half done, done and not reported.
REREADS = (
    *("before-reread-commit", "before-step", "before-table-written", "after-table-written", "after-step"),
    "after-reread-commit",
)
REDEFINITIONS = (
    *("before-redefinition", "before-step", "before-table-written", "after-column-altered", "after-table-written"),
    *("after-step", "after-redefinition"),
)


def operations(spark: SparkSession, pipeline: PipelineUnderTest) -> Counter[str]:
    """Return how often each operation was done on the target table."""
    history = spark.sql(f"DESCRIBE HISTORY delta.`{pipeline.directory}/lake/public/t`").select("operation").collect()
    return Counter(operation for (operation,) in history)


def writes(spark: SparkSession, pipeline: PipelineUnderTest) -> int:
    """Return how often all rows of the target table were written: by its first chunk, and by re-reads."""
    done = operations(spark, pipeline)
    return done["WRITE"] + done["CREATE OR REPLACE TABLE AS SELECT"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "place_of_tables"),
    [("mirror", "catalog"), ("changelog", "path")],
)
def test_re_reads_and_changes_of_schema_are_done_once_whatever_breaks_off(
    spark: SparkSession,
    databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    mode: str,
    place_of_tables: str,
) -> None:
    sink = {"catalog": request.getfixturevalue("catalog")} if place_of_tables == "catalog" else {}
    pipeline = pipeline_of(tmp_path, databases, ["public.t"], mode, **sink)
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)", "INSERT INTO public.t VALUES (1, 'a'), (2, 'b')"
    )
    pipeline.provision()
    pipeline.copy()

    def reread() -> None:
        commands.resnapshot(pipeline.pipeline, tables=["public.t"])

    def breaks(place: str, run: Callable[[], object]) -> None:
        with monkeypatch.context() as armed:
            armed.setenv(VARIABLE, f"{place}:error")
            with pytest.raises(Failpoint, match=place):
                run()

    for place in REREADS:
        pipeline.source(f"UPDATE public.t SET body = '{place}' WHERE id = 1")
        breaks(place, reread)
        if place == REREADS[0]:
            reread()
        pipeline.apply()
    assert_verified(pipeline)
    if mode == "mirror":
        assert writes(spark, pipeline) == 1 + len(REREADS)
    else:
        counts = "SELECT _op, count(*) FROM {t} WHERE _op IN ('r', 't') GROUP BY 1 ORDER BY 1"
        assert rows(spark, pipeline, counts) == [("r", 2 + 2 * len(REREADS)), ("t", len(REREADS))]
    for n, place in enumerate(REDEFINITIONS):
        pipeline.source(
            f"ALTER TABLE public.t ADD COLUMN more{n} int DEFAULT {n}",
            f"UPDATE public.t SET body = '{place}', more{n} = 77 WHERE id = 1",
        )
        breaks(place, pipeline.apply)
        pipeline.apply()
    assert_verified(pipeline)
    done = operations(spark, pipeline)
    assert (done["ADD COLUMNS"], done["UPDATE"]) == (len(REDEFINITIONS), len(REDEFINITIONS)), done
    found = rows(
        spark,
        pipeline,
        "SELECT DISTINCT {} FROM {{t}} WHERE id = 2".format(", ".join(f"more{n}" for n in range(len(REDEFINITIONS)))),
    )
    assert found == [tuple(range(len(REDEFINITIONS)))]


def test_a_changelog_has_everything_once_whatever_breaks_off(
    spark: SparkSession, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(tmp_path, databases, ["public.t"], "changelog")
    pipeline.source(AUDITED)
    pipeline.provision()
    pipeline.copy()
    pipeline.source("TRUNCATE public.audit")
    for n, place in enumerate(PLACES):
        pipeline.source(
            f"UPDATE public.t SET body = '{place}' WHERE id % 10 = 0 AND id <= 100",
            f"UPDATE public.t SET id = {5000 + n} WHERE id = {n + 1}",
            f"DELETE FROM public.t WHERE id = {1000 + n}",
        )
        with monkeypatch.context() as armed:
            armed.setenv(VARIABLE, f"{place}:error")
            with pytest.raises(Failpoint, match=place):
                pipeline.apply()
    pipeline.apply()
    found = rows(spark, pipeline, "SELECT _xid, _op, id FROM {t} WHERE _op <> 'r' ORDER BY ALL")
    assert found == pipeline.source_rows(
        "SELECT xid::text::bigint, op, coalesce(new_id, old_id) FROM public.audit ORDER BY 1, 2, 3"
    )
    assert_verified(pipeline)


@pytest.mark.thorough
def test_a_run_that_is_killed_with_its_spark(spark: SparkSession, databases: Databases, tmp_path: Path) -> None:
    """A table was written that the record does not know. Before that, a kill leaves the same as an error.

    An exception is a table that is being created, whose log may be incomplete: see ``test_delta_tables.py``.

    It first reaches the place in a chunk, and the fourth time in the stream.
    """
    pipeline = pipeline_of(tmp_path, databases, ["public.t"])
    pipeline.source(AUDITED)
    program = [sys.executable, "-m", "tests.support.delta_run", str(pipeline.file)]
    ours = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with writing(databases.source):
        for number in (1, 4):
            place = f"after-table-written:kill:{number}"
            killed = pipeline.start_program(f"run killed {place}", program, place, ours).wait()
            assert killed.code == -9, killed.stderr[-2000:]
    commands.provision(pipeline.pipeline, takeover=True)
    for chunk in pipeline.record.unfinished:
        pipeline.copy(chunk.index)
    pipeline.apply()
    assert_verified(pipeline)
    assert rows(spark, pipeline, "SELECT count(*), count(DISTINCT id) FROM {t}") == pipeline.source_rows(
        "SELECT count(*), count(*) FROM public.t"
    )


@pytest.mark.thorough
def test_a_re_read_and_a_change_of_schema_that_are_killed_with_their_spark(
    spark: SparkSession, databases: Databases, tmp_path: Path
) -> None:
    """The change is killed between its two steps on the table, and again when it is resumed."""
    pipeline = pipeline_of(tmp_path, databases, ["public.t"])
    pipeline.source(
        "CREATE TABLE public.t (id int PRIMARY KEY, body text)", "INSERT INTO public.t VALUES (1, 'a'), (2, 'b')"
    )
    pipeline.provision()
    pipeline.copy()
    program = [sys.executable, "-m", "tests.support.delta_run", str(pipeline.file)]
    ours = {"PYTHONPATH": str(Path(__file__).parents[3])}

    def kill(place: str, *reread: str) -> None:
        killed = pipeline.start_program(f"run killed {place}", [*program, *reread], f"{place}:kill", ours).wait()
        assert killed.code == -9, killed.stderr[-2000:]

    kill("after-table-written", "public.t")
    pipeline.source("ALTER TABLE public.t ADD COLUMN more int DEFAULT 7", "UPDATE public.t SET more = 8 WHERE id = 1")
    kill("after-column-altered")
    kill("before-table-written")
    commands.provision(pipeline.pipeline, takeover=True)
    pipeline.apply()
    assert_verified(pipeline)
    assert rows(spark, pipeline, "SELECT id, body, more FROM {t} ORDER BY id") == [(1, "a", 8), (2, "b", 7)]
    done = operations(spark, pipeline)
    assert (done["WRITE"], done["ADD COLUMNS"], done["UPDATE"]) == (2, 1, 1), done


def test_columns_that_merge_adds_itself_are_refused_before_anything_is_touched(
    databases: Databases, tmp_path: Path
) -> None:
    pipeline = pipeline_of(tmp_path, databases, ["public.t"])
    pipeline.source('CREATE TABLE t (id int PRIMARY KEY, "_metadata" int, "_Row_Dropped_" int)')
    (found,) = [finding for finding in preflight(pipeline.pipeline) if not finding.ok]
    assert isinstance(found.error, UncapturableTable)
    assert "(_metadata, _Row_Dropped_)" in found.message
    with pytest.raises(UncapturableTable):
        commands.provision(pipeline.pipeline)
    assert not (tmp_path / "lake/public").exists()
    for things in ("pg_replication_slots WHERE database = current_database()", "pg_publication"):
        assert pipeline.source_rows(f"SELECT count(*) FROM {things}") == [(0,)]
