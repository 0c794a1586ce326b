"""Delta tables whose creation was interrupted, and Spark's configuration and messages, on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.core.errors import ConfigError, ForeignTable, StreamFailed
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.sink_checks import targets_of
from airflow_cdc_provider.engine.sinks.delta import spark_errors as delta_spark
from airflow_cdc_provider.engine.sinks.delta.checks import check
from airflow_cdc_provider.engine.sinks.delta.plugin import DeltaPlugin
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.sink import DeltaSink
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk
from tests.sinks.begun_sink import IDENTITY, LABEL, ORIGIN, TABLE, TARGET, WATERMARK, WHOLE, text
from tests.support.delta_spark import delta_session
from tests.support.given_rows import GivenRows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with delta_session() as session:
        yield session


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume that no other process creates tables here."""
    monkeypatch.setattr(delta_spark, "_PAUSE_SECONDS", 0)


def prepared(root: Path, target: Target = TARGET, catalog: str | None = None) -> tuple[DeltaSink, int]:
    sink = DeltaPlugin().open(DeltaSettings(str(root), catalog), "p")
    assert isinstance(sink, DeltaSink)
    sink.prepare([target], [WHOLE], IDENTITY, 100)
    return sink, sink.take_epoch("test")


def copy(sink: DeltaSink, epoch: int, target: Target = TARGET) -> int | None:
    columns = [text("1"), text("a"), text("1.50")]
    rows = pa.RecordBatch.from_arrays(columns, names=["id", "note", "amount"])
    written = sink.write_chunk(epoch, target, WHOLE, ORIGIN, GivenRows([rows], lambda: WATERMARK))
    return sink.commit_chunks(epoch, [CopiedChunk(target, WHOLE, ORIGIN, written)])[0]


@pytest.mark.parametrize("left", ["", f".{0:020}.json.0e7b.tmp"])
def test_a_table_whose_making_was_cut_off_is_made(spark: SparkSession, tmp_path: Path, left: str) -> None:
    sink, epoch = prepared(tmp_path)
    log = tmp_path / "copy" / "Ord ers" / "_delta_log"
    log.mkdir(parents=True)
    if left:
        (log / left).touch()
    assert not sink.is_there(TARGET)
    assert copy(sink, epoch) == 1
    assert [batch.num_rows for batch in sink.rows(TARGET)] == [1]
    assert sink.missing([TARGET]) == ()


def test_the_folder_of_others_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    sink, epoch = prepared(tmp_path)
    folder = tmp_path / "copy" / "Ord ers"
    folder.mkdir(parents=True)
    (folder / "theirs.parquet").touch()
    with pytest.raises(StreamFailed) as refused:
        copy(sink, epoch)
    assert str(folder) in refused.value.solution
    assert [path.name for path in folder.iterdir()] == ["theirs.parquet"]
    (folder / "theirs.parquet").unlink()
    assert sink.missing([TARGET]) == ()
    assert sink.record().unfinished == ()  # type: ignore[union-attr]


def test_a_table_that_the_catalog_does_not_know_can_be_made_known(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql(f"CREATE SCHEMA copy LOCATION '{tmp_path}/copy'")
    try:
        target = replace(TARGET, name="t")
        sink, epoch = prepared(tmp_path, target, "spark_catalog")
        spark.sql(f"CREATE TABLE delta.`{tmp_path}/copy/t` (id BIGINT, note STRING, amount DECIMAL(10,2)) USING delta")
        with pytest.raises(StreamFailed, match=f"{tmp_path}/copy/t") as refused:
            copy(sink, epoch, target)
        assert "CREATE TABLE `spark_catalog`.`copy`.`t` USING delta LOCATION" in refused.value.solution
        spark.sql(f"CREATE TABLE `spark_catalog`.`copy`.`t` USING delta LOCATION '{tmp_path}/copy/t'")
        assert sink.missing([target]) == ()
        assert [batch.num_rows for batch in sink.rows(target)] == [1]
    finally:
        spark.sql("DROP SCHEMA copy CASCADE")


def test_a_condition_that_fails_on_a_row_is_refused_as_one_that_cannot_be_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink, epoch = prepared(tmp_path)
    copy(sink, epoch)
    with pytest.raises(ConfigError, match="DIVIDE_BY_ZERO"):
        sink.matching_keys(TARGET, "1 / (id - 1) > 0")


@pytest.mark.parametrize(
    ("columns", "properties", "named"),
    [
        (
            "id BIGINT GENERATED ALWAYS AS IDENTITY, note VARCHAR(3), amount DECIMAL(10,1) NOT NULL, x INT NOT NULL",
            "TBLPROPERTIES ('delta.appendOnly' = 'true')",
            (
                "id is generated",
                "note is VARCHAR(3) but must be STRING",
                "amount is DECIMAL(10,1) but must be DECIMAL(10,2)",
                "amount is NOT NULL, but not every row has a value for it",
                "x is NOT NULL, but no row has such a column",
                "delta.appendOnly is true, but a mirror changes and deletes rows",
            ),
        ),
        (
            "id BIGINT NOT NULL, note CHAR(2), amount DECIMAL(10,2) GENERATED ALWAYS AS (CAST(id AS DECIMAL(10,2)))",
            "",
            ("note is CHAR(2) but must be STRING", "amount is generated"),
        ),
        (
            "id BIGINT NOT NULL, Note STRING, amount DECIMAL(10,2), theirs INT, day INT NOT NULL DEFAULT 1",
            "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')",
            (),
        ),
    ],
)
def test_a_table_that_would_not_keep_the_rows_is_refused_before_anything_is_written(
    spark: SparkSession, tmp_path: Path, columns: str, properties: str, named: tuple[str, ...]
) -> None:
    spark.sql(f"CREATE TABLE delta.`{tmp_path}/copy/Ord ers` ({columns}) USING delta {properties}")
    sink = {"type": "delta", "path": str(tmp_path), "schema": "copy"}
    pipeline = Pipeline.parse(
        {"pipeline": "p", "source": {"dsn": "postgresql://h/d", "tables": [LABEL]}, "sink": sink, "state": "file:///x"}
    )
    checks = Checks(nullcontext)
    settings = cast(DeltaSettings, pipeline.sink)
    check(settings, DeltaPlugin().open(settings, "p"), checks, targets_of(pipeline, [TABLE]))
    (error,) = [finding.error for finding in checks.findings if finding.check == "target tables"]
    if not named:
        assert error is None
        assert copy(*prepared(tmp_path)) == 1
        assert [row["note"] for row in spark.table(f"delta.`{tmp_path}/copy/Ord ers`").collect()] == ["a"]
        return
    with pytest.raises(ForeignTable) as refused:
        prepared(tmp_path)
    assert error is not None
    assert error.message == refused.value.message
    assert refused.value.message.partition("cannot have the rows: ")[2].split("; ") == list(named)
    assert [path.name for path in (tmp_path / "copy" / "Ord ers").iterdir()] == ["_delta_log"]


def test_of_a_changelog_only_what_every_event_has_may_be_not_null(spark: SparkSession, tmp_path: Path) -> None:
    columns = "_op STRING NOT NULL, _commit_lsn BIGINT NOT NULL, _seq BIGINT, _xid BIGINT, _commit_ts TIMESTAMP"
    columns = f"id BIGINT {{}}, note STRING, amount DECIMAL(10,2), {columns}, _before STRING, _unchanged ARRAY<STRING>"
    table = f"delta.`{tmp_path}/copy/Ord ers`"
    sink = DeltaPlugin().open(DeltaSettings(str(tmp_path), mode="changelog"), "p")
    spark.sql(
        f"CREATE TABLE {table} ({columns.format('NOT NULL')}) USING delta TBLPROPERTIES (delta.appendOnly = true)"
    )
    with pytest.raises(ForeignTable, match=r"rows: id is NOT NULL, but not every event has a value for it$"):
        sink.prepare([TARGET], [WHOLE], IDENTITY, 100)
    spark.sql(f"ALTER TABLE {table} ALTER COLUMN id DROP NOT NULL")
    sink.prepare([TARGET], [WHOLE], IDENTITY, 100)


def test_a_table_of_a_catalog_that_is_not_of_delta_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql(f"CREATE SCHEMA copy LOCATION '{tmp_path}/copy'")
    try:
        spark.sql("CREATE TABLE copy.t (id BIGINT, note STRING, amount DECIMAL(10,2)) USING parquet")
        with pytest.raises(ForeignTable, match=r"copy\.t exists, but has the format parquet instead of Delta"):
            prepared(tmp_path, replace(TARGET, name="t"), "spark_catalog")
    finally:
        spark.sql("DROP SCHEMA copy CASCADE")
