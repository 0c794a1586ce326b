"""Paths, folders and names that Delta, Spark or a catalog do not allow: no Spark runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from airflow_cdc_provider.engine.core.errors import ConfigError, UncapturableTable
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.sinks.delta.settings import DeltaSettings
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, require_apart, require_possible
from airflow_cdc_provider.engine.sinks.lake.paths import folder
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from tests.sinks.begun_sink import TABLE, TARGET
from tests.support.files_sink import ID, column, table


@pytest.mark.parametrize("path", ["lake/shop", "s3a://key:secret@bucket/lake", "hdfs://me@host/lake"])
def test_paths_that_driver_and_executors_take_for_others_and_passwords_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"sink\.path") as refused:
        DeltaSettings.parse(Section("sink", {"path": path}, {}, True))
    assert "secret" not in str(refused.value)
    for fine in ("/lake/shop", "s3a://bucket/lake", "abfs://container@account.dfs.core.windows.net/lake"):
        assert DeltaSettings.parse(Section("sink", {"path": f"{fine}/"}, {}, True)).path == fine


@pytest.mark.parametrize("path", ["/lake/[a]", "s3a://bucket/lake*", "/lake/{a,b}", "/la?ke", "/lake\\a"])
def test_a_path_that_readers_take_for_a_pattern_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"sink\.path") as refused:
        DeltaSettings.parse(Section("sink", {"path": path}, {}, True))
    assert "patterns" in refused.value.solution


def test_a_url_that_spark_cannot_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sink\.path") as refused:
        DeltaSettings.parse(Section("sink", {"path": "webhdfs://namenode:9870/lake"}, {}, True))
    assert "Spark" in refused.value.solution


NAMES = (
    *("..", ".", "a/b", "a", "b", "/", "_airflow_cdc", "%5Fairflow_cdc", ".hidden", "a.", "a%2Fb", "%", "a:b", "::int"),
    *("#", "?", "*", "[a]", "{a,b}", "a=b", "back\\slash", "new\nline", "\x7f", "Ord ers", "Größe", "a~b"),
)


def test_folders_of_targets_stand_in_the_lake_each_by_itself() -> None:
    folders = [folder(schema, name) for schema in NAMES for name in NAMES]
    assert len(set(folders)) == len(NAMES) ** 2
    for found in folders:
        assert len(parts := found.split("/")) == 2
        assert not any(part.startswith(("_", ".")) or part.endswith(".") for part in parts)
        assert not set(found) & set(":#?*[]{}=\\\n\x7f")
    assert folder("Ord ers", "Größe") == "Ord ers/Größe", "as in Hive"
    assert [unquote(part) for part in folder("a/b", "..").split("/")] == ["a/b", ".."]


def test_names_that_spark_or_files_cannot_have_are_refused(tmp_path: Path) -> None:
    layout = Layout(Storage(str(tmp_path)), "spark_catalog")
    for schema, name in (("copy", "a.b"), ("Größe", "t")):
        with pytest.raises(ConfigError, match="letters from A to Z"):
            require_possible(layout, replace(TARGET, schema=schema, name=name), "mirror")
        require_possible(replace(layout, catalog="unity"), replace(TARGET, schema=schema, name=name), "mirror")
    require_possible(layout, replace(TARGET, schema="copy", name="_1"), "mirror")
    spaced = Target(table(ID, column("a b", "integer", 2)), "public", "t")
    unmapped = Layout(Storage(str(tmp_path)), properties=(("delta.columnMapping.mode", "none"),))
    require_possible(Layout(Storage(str(tmp_path))), spaced, "mirror")
    with pytest.raises(UncapturableTable, match=r"\(a b\)"):
        require_possible(unmapped, spaced, "mirror")
    dotted = Target(table(ID, column("a.b", "integer", 2)), "public", "t")
    with pytest.raises(ConfigError, match=r"these columns of public\.t: a\.b"):
        require_possible(Layout(Storage(str(tmp_path)), partition_by=(("public.t", ("a.b",)),)), dotted, "mirror")


@pytest.mark.parametrize(
    "name",
    [
        *("_metadata", "_METADATA", "deletionVectorId", "_row_dropped_", "_source_row_present_", "__condition__"),
        "__delta_internal_row_index",
    ],
)
def test_names_that_delta_gives_to_columns_of_its_own_are_refused(tmp_path: Path, name: str) -> None:
    target = Target(table(ID, column(name, "integer", 2)), "public", "t")
    with pytest.raises(UncapturableTable, match=rf"\({name}\) whose names are reserved by Delta"):
        require_possible(Layout(Storage(str(tmp_path))), target, "mirror")


def test_names_of_the_change_feed_are_refused_where_there_is_one(tmp_path: Path) -> None:
    target = Target(table(ID, column("_Change_type", "integer", 2)), "public", "t")
    require_possible(Layout(Storage(str(tmp_path))), target, "mirror")
    feeding = Layout(Storage(str(tmp_path)), properties=(("delta.enableChangeDataFeed", "true"),))
    with pytest.raises(UncapturableTable, match=r"\(_Change_type\)"):
        require_possible(feeding, target, "mirror")


def test_tables_that_a_catalog_takes_for_one_are_refused(tmp_path: Path) -> None:
    one, other = (Target(replace(TABLE, name=name), "copy", name) for name in ("Orders", "orders"))
    require_apart(Layout(Storage(str(tmp_path))), [one, other])
    require_apart(Layout(Storage(str(tmp_path)), "unity"), [one, replace(other, schema="others")])
    with pytest.raises(ConfigError, match=r"public\.Orders and public\.orders would be one table"):
        require_apart(Layout(Storage(str(tmp_path)), "unity"), [one, other])
