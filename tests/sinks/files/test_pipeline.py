"""Pipelines into files, from a real source: each change once, schema changes, readers and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from tests.conftest import Databases
from tests.support.audited import AUDITED, writing
from tests.support.files_pipeline import FilesPipeline, assert_files_exactly_once


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> FilesPipeline:
    return FilesPipeline(tmp_path, databases, ["public.t"])


@pytest.mark.parametrize("format_", ["parquet", "json"])
def test_each_change_stands_once_beside_the_snapshot(databases: Databases, tmp_path: Path, format_: str) -> None:
    pipeline = FilesPipeline(tmp_path, databases, ["public.t"], format=format_)
    pipeline.source(AUDITED)
    with writing(databases.source) as writers:
        pipeline.provision()
        pipeline.copy()
        pipeline.apply()
        assert sum(writer.transactions for writer in writers) > 0
    pipeline.apply()
    assert_files_exactly_once(pipeline, 10)
    pipeline.assert_verified()


def test_verify_names_what_differs(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_verified()
    pipeline.source("UPDATE public.t SET body = 'unseen' WHERE id = 1", "INSERT INTO public.t VALUES (3, 'c')")
    (found,) = commands.verify(pipeline.pipeline)["tables"]
    assert {(d["key"]["id"], d["kind"]) for d in found["differences"]} == {("1", "different"), ("3", "missing")}
    for file in (pipeline.root / "public").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(CdcError, match="no longer exist"):
        commands.verify(pipeline.pipeline)


TYPES = """
CREATE TABLE public.t (id bigint PRIMARY KEY, flag boolean, small smallint, n numeric, d numeric(12, 3),
    r real, f double precision, day date, at timestamptz, local timestamp, bytes bytea, doc jsonb, tags text[],
    span interval, u uuid, txt varchar(20), mood public.mood)
"""


VALUES = """
INSERT INTO public.t SELECT {0}, true, -3, 12345678901234567890.5, -0.001, 'NaN', 1e300, '2024-02-29',
    '2024-03-31 01:30:00.123456+02', '0001-01-01', '\\x00ff', '{{"a": [1, null]}}', ARRAY['a b', NULL, '"'],
    '1 mon -2 days', '00000000-0000-0000-0000-000000000001', E'tab\\t"q" \\\\', 'glad'
"""


@pytest.mark.parametrize("format_", ["parquet", "json"])
def test_values_of_all_kinds_come_back_as_they_were(databases: Databases, tmp_path: Path, format_: str) -> None:
    pipeline = FilesPipeline(tmp_path, databases, ["public.t"], format=format_)
    pipeline.source("CREATE TYPE public.mood AS ENUM ('sad', 'glad')", TYPES)
    pipeline.source("ALTER TABLE public.t REPLICA IDENTITY FULL", VALUES.format(1))
    pipeline.provision()
    pipeline.copy()
    pipeline.source(VALUES.format(2), "INSERT INTO public.t (id) VALUES (3)", "UPDATE public.t SET small = 4")
    pipeline.apply()
    pipeline.assert_verified()
    if format_ == "parquet":
        query = 'SELECT typeof(id), typeof(flag), typeof(d), typeof(f), typeof(day), typeof("at"), typeof(bytes) FROM t'
        assert pipeline.read(f"{query} LIMIT 1") == [
            ("BIGINT", "BOOLEAN", "DECIMAL(12,3)", "DOUBLE", "DATE", "TIMESTAMP WITH TIME ZONE", "BLOB")
        ]
    ((before,),) = pipeline.read("SELECT _before FROM t WHERE _op = 'u' AND id = 2")
    assert json.loads(before)["small"] == "-3"


def test_changes_of_schema_are_followed(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    steps = [
        ("ALTER TABLE public.t ADD COLUMN b int", "UPDATE public.t SET b = 1 WHERE id = 1"),
        ("ALTER TABLE public.t ADD COLUMN c int DEFAULT 7", "UPDATE public.t SET b = 2 WHERE id = 1"),
        ("ALTER TABLE public.t RENAME COLUMN b TO d", "UPDATE public.t SET d = 3 WHERE id = 1"),
        ("ALTER TABLE public.t ALTER COLUMN d TYPE bigint", "UPDATE public.t SET d = 5000000000 WHERE id = 1"),
        ("ALTER TABLE public.t DROP COLUMN c", "DELETE FROM public.t WHERE id = 2"),
        ("TRUNCATE public.t", "INSERT INTO public.t VALUES (9, 'z', 9)"),
    ]
    for ddl, change in steps:
        pipeline.source(ddl, change)
        pipeline.apply()
        pipeline.assert_verified()
    assert pipeline.read("SELECT typeof(d) FROM t LIMIT 1") == [("BIGINT",)]
    told = json.loads((pipeline.root / "_manifest" / f"{pipeline.name}.json").read_text())
    assert told["tables"]["public.t"]["version"] == 2
    assert told["applied"] == json.loads(json.dumps(commands.status(pipeline.pipeline)))["applied_lsn"]


def test_tables_are_read_again_while_the_pipeline_goes_on(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.source("UPDATE public.t SET a = 'later' WHERE id = 2")
    pipeline.apply()
    pipeline.assert_verified()
    assert pipeline.read("SELECT _op, count(*) FROM t GROUP BY 1 ORDER BY 1") == [("r", 4), ("t", 1), ("u", 1)]


def test_the_repair_of_everything_begins_the_changelog_anew(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    pipeline.source(f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    pipeline.source("DELETE FROM public.t WHERE id = 1")
    commands.resnapshot(pipeline.pipeline, everything=True)
    pipeline.copy()
    pipeline.apply()
    pipeline.assert_verified()


def test_a_preflight_finds_nothing_and_changes_nothing(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)")
    findings = preflight(pipeline.pipeline)
    assert all(finding.ok for finding in findings), findings
    assert {"sink", "codec", "column names", "target folders"} <= {finding.check for finding in findings}
    assert list(pipeline.root.rglob("*")) == []


def test_a_preflight_finds_files_of_others(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)")
    (pipeline.root / "public" / "t").mkdir(parents=True)
    (pipeline.root / "public" / "t" / "theirs").touch()
    (found,) = [finding for finding in preflight(pipeline.pipeline) if not finding.ok]
    assert "theirs" in found.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mode": "mirror"}, "type: delta"),
        ({"format": "csv"}, "parquet or json"),
        ({"path": "relative"}, "absolute"),
        ({"path": "s3://key:secret@bucket/x"}, "without user"),
    ],
)
def test_settings_that_cannot_be_are_refused(pipeline: FilesPipeline, change: dict[str, Any], said: str) -> None:
    pipeline.change(sink=change)
    with pytest.raises(ConfigError) as told:
        pipeline.pipeline
    assert said in told.value.solution


def test_dropping_the_pipeline_leaves_its_files(pipeline: FilesPipeline) -> None:
    pipeline.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'x')")
    pipeline.provision()
    pipeline.copy()
    commands.drop(pipeline.pipeline)
    assert pipeline.read("SELECT id, a FROM t") == [(1, "x")]
