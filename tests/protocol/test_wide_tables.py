"""Tables with as many columns as Postgres allows; staging holds more values for them than a table may have columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import pack
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]
KINDS = ("keyed", "whole", "keyless")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_the_widest_tables(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    columns = 1600 if mode == "mirror" else 1593
    pipeline = PipelineUnderTest(tmp_path, databases, [f"public.{name}" for name in KINDS], sink={"mode": mode})
    for name in KINDS:
        integers = ", ".join(f"c{i} int DEFAULT {100_000 + i}" for i in range(columns - 2))
        pipeline.source(
            f"CREATE TABLE {name} (id int NOT NULL, w text, {integers})",
            f"ALTER TABLE {name} ALTER w SET STORAGE EXTERNAL",
            f"INSERT INTO {name} (id, w) SELECT g, repeat('x', 5000) FROM generate_series(1, 6) g",
        )
        if name != "keyless":
            pipeline.source(f"ALTER TABLE {name} ADD PRIMARY KEY (id)")
        if name != "keyed":
            pipeline.source(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    pipeline.provision()
    pipeline.copy_tables()
    for name in KINDS:
        pipeline.source(
            f"INSERT INTO {name} (id, w, c1) VALUES (7, 'a \"b\" \\ ,{{}}', NULL), (8, '', 0), (9, 'NULL', -1)",
            f"UPDATE {name} SET c1 = c1 + 1 WHERE id = 1",
            f"UPDATE {name} SET id = id + 100 WHERE id IN (2, 7)",
            f"DELETE FROM {name} WHERE id IN (3, 8)",
        )
    pipeline.apply()
    for name in KINDS:
        names = ["id", "w", "c0", "c1", f"c{columns - 3}"]
        if mode == "changelog":
            assert_same_values(pipeline, ["id"], names, "public", name)
        else:
            pipeline.assert_equal(name)
    if mode == "changelog":
        query = "SELECT _before FROM whole WHERE _op = 'd' AND id = 3"
        ((before,),) = pipeline.target_rows(query)
        assert len(before) == columns
        assert (before["id"], before["c5"], len(before["w"])) == ("3", "100005", 5000)
    pipeline.assert_verified()
    commands.resnapshot(pipeline.pipeline, tables=["public.keyed"])
    pipeline.assert_verified()


def test_a_changelog_that_would_be_too_wide_is_refused(databases: Databases, tmp_path: Path) -> None:
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": "changelog"})
    integers = ", ".join(f"c{i} int" for i in range(1593))
    pipeline.source(f"CREATE TABLE t (id int PRIMARY KEY, {integers})")
    errors = [finding.error for finding in preflight(pipeline.pipeline) if finding.error is not None]
    assert [type(error) for error in errors] == [LimitExceeded]
    assert "1594 columns" in errors[0].message
    with pytest.raises(LimitExceeded, match="at most 1,600"):
        pipeline.provision()
    assert pipeline.target_rows("SELECT to_regclass('public.t')::text") == [(None,)]


def test_only_what_is_too_much_is_packed() -> None:
    def rows(**counts: int) -> pa.Table:
        made: dict[str, Any] = {"op": ["i"]}
        for letter, count in counts.items():
            made |= {f"{letter}{i}": pa.array([f"{letter}{i}"], pa.large_string()) for i in range(count)}
        return pa.table(made)

    assert pack(rows(c=90, b=90)).column_names == rows(c=90, b=90).column_names
    old = pack(rows(c=101, b=101))
    assert old.column_names == [*rows(c=101).column_names, "b"]
    assert old["b"].to_pylist() == ["{" + ",".join(f"b{i}" for i in range(101)) + "}"]
    assert pack(rows(c=1599)).num_columns == 1600
    assert pack(rows(c=1600)).column_names == ["op", "c"]
    assert pack(rows(c=1600, b=1600)).column_names == ["op", "b", "c"]
