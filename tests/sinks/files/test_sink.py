"""The files sink alone: the contents of its files, its lists for readers, and its commits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, Failpoint, LimitExceeded, StagingLost
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import FIRST_READ, Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.files import manifest
from airflow_cdc_provider.engine.sinks.files.row_format import writer
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, RowsNeeded
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import ChangelogContract, LakeContract
from tests.support.files_sink import (
    AT,
    BODY,
    CHUNKS,
    DAY,
    ID,
    ORIGIN,
    SOURCE,
    STORES,
    TARGET,
    change,
    chunk,
    column,
    data_files,
    effect,
    events,
    paths,
    provisioned,
    rows,
    table,
    told,
    unit,
    unused,
    watermark,
)
from tests.support.files_store import FilesStore
from tests.support.given_rows import GivenRows


@pytest.fixture(params=STORES)
def sink(request: pytest.FixtureRequest) -> Iterator[FilesSink]:
    with provisioned(request.param, request) as found:
        yield found


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[FilesStore]:
    with unused(request.param, request) as found:
        yield FilesStore(found)


class TestProtocol(ProtocolContract):
    """The contract of the protocol on files."""

    mode = "changelog"


class TestChangelog(ChangelogContract, LakeContract):
    """The contracts of changelogs and lakes on files."""


ROW = ("1", "one", "2026-01-02 03:04:05.678+00")


def test_snapshot_rows_and_changes_stand_in_the_files_as_the_source_has_written_them(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    assert chunk(sink, epoch, CHUNKS[0], ROW, ("2", None, None)) == 2
    assert chunk(sink, epoch, CHUNKS[0], ROW) is None, "it has been committed"
    assert chunk(sink, epoch, CHUNKS[1], ("9", 'q"\\\n', None)) == 1
    moved = change("u", 60, "3", "new", None, unchanged='{"at"}', old_kind="K", b0="1", b1=None, b2=None)
    gone = change("d", 70, "2", None, None, old_kind="O", b0="2", b1='a "b"\n', b2=None)
    assert unit(sink, epoch, 50, 70, effect(moved, gone))
    found = events(sink)
    assert [(e["_op"], e["_commit_lsn"], e["_seq"], e["id"], e["body"], e["at"]) for e in found] == [
        ("r", "0/32", str(FIRST_READ), "1", "one", "2026-01-02 03:04:05.678+00"),
        ("r", "0/32", str(FIRST_READ), "2", None, None),
        ("r", "0/32", str(FIRST_READ), "9", 'q"\\\n', None),
        ("u", "0/3C", "1", "3", "new", None),
        ("d", "0/46", "1", "2", None, None),
    ]
    assert [e["_unchanged"] for e in found] == [None, None, None, "{at}", None]
    assert [e["_before"] and json.loads(e["_before"]) for e in found] == [
        *(None, None, None),
        {"id": "1"},
        {"id": "2", "body": 'a "b"\n', "at": None},
    ]
    record = sink.record()
    assert record is not None
    assert (record.applied, record.unfinished) == (70, ())


LIST = "list.list.element"


@pytest.mark.parametrize(("first", "dictionaries"), [(5000, {LIST, "repeats"}), (1, {LIST, "repeats", "differs"})])
def test_a_dictionary_is_made_where_values_come_again(tmp_path: Path, first: int, dictionaries: set[str]) -> None:
    """If there are few first rows, they do not show where."""
    numbers = range(20_000)
    rows = pa.table({"differs": numbers, "list": [[str(n % 9)] for n in numbers], "repeats": [n % 99 for n in numbers]})
    with (tmp_path / "x").open("wb") as file:
        made = writer("parquet", file, rows.schema)
        for part in (rows.slice(0, first), rows.slice(first)):
            made.write(part)
        made.close()
    assert pq.read_table(tmp_path / "x").equals(rows)
    written = pq.ParquetFile(tmp_path / "x").metadata
    columns = (written.row_group(group).column(n) for group in range(written.num_row_groups) for n in range(3))
    assert {column.path_in_schema for column in columns if column.has_dictionary_page} == dictionaries


def test_a_file_without_rows_has_its_columns(tmp_path: Path) -> None:
    schema = pa.schema({"k": pa.int64()})
    with (tmp_path / "x").open("wb") as file:
        writer("parquet", file, schema).close()
    assert pq.read_table(tmp_path / "x").equals(schema.empty_table())


def test_files_stand_by_table_and_date(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    assert unit(sink, epoch, 50, 70, effect(change("i", 60, *ROW), change("i", 70, "2", None, None, ts=3 * DAY)))
    folders = [name.rpartition("/")[0] for name in data_files(sink)]
    assert folders == ["public/t/_date=1970-01-02", "public/t/_date=1970-01-04"]
    (one, other) = told(sink)["tables"]["public.t"]["files"]
    assert (one["date"], one["rows"], one["first"], one["last"]) == ("1970-01-02", 1, "0/3C", "0/3C")
    assert paths(sink) == [one["path"], other["path"]]


@pytest.fixture
def parquet(request: pytest.FixtureRequest) -> Iterator[FilesSink]:
    with provisioned("parquet", request) as found:
        yield found


def test_every_plain_reader_reads_what_the_list_names(parquet: FilesSink) -> None:
    epoch = parquet.take_epoch("me")
    chunk(parquet, epoch, CHUNKS[0], ROW, ("2", None, None))
    unit(parquet, epoch, 50, 70, effect(change("i", 60, "3", None, None)))
    found = paths(parquet)
    assert pl.scan_parquet(found).select(pl.len()).collect().item() == 3
    assert duckdb.sql(f"SELECT count(*), max(_commit_lsn) FROM read_parquet({found})").fetchall() == [(3, 60)]
    schema = pq.read_schema(found[0])
    assert schema.field("id").type == pa.int64()
    assert schema.field("at").type == pa.timestamp("us", "UTC")
    assert schema.field("_commit_lsn").type == pa.int64()
    assert schema.field("_unchanged").type == pa.list_(pa.field("element", pa.string()))


def test_json_lines_are_read_by_duckdb(tmp_path: Path) -> None:
    sink = FilesSink(Storage(str(tmp_path)), "shop", "changelog", "json")
    sink.prepare([TARGET], CHUNKS, SOURCE, 50)
    epoch = sink.take_epoch("me")
    chunk(sink, epoch, CHUNKS[0], ROW, ("9223372036854775807", None, None))
    query = f"SELECT id, body, _commit_lsn FROM read_json({paths(sink)}, format = 'newline_delimited') ORDER BY id"
    assert duckdb.sql(query).fetchall() == [(1, "one", 50), (9223372036854775807, None, 50)]


def test_a_unit_is_in_all_tables_at_once_or_in_none(sink: FilesSink, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = sink.take_epoch("me")
    other = Target(replace(TARGET.table, name="u", oid=11), "public", "u")
    sink.add(epoch, [other], [])
    effects = [effect(change("i", 60, *ROW)), effect(change("i", 60, *ROW), label="public.u")]
    monkeypatch.setenv(VARIABLE, "before-entry:error")
    with pytest.raises(Failpoint):
        unit(sink, epoch, 50, 60, *effects)
    monkeypatch.delenv(VARIABLE)
    assert events(sink) == events(sink, other) == []
    assert len(data_files(sink)) == 2, "they are there, and no list names them"
    assert paths(sink) == paths(sink, "public/u") == []
    sink.sweep(epoch)
    assert data_files(sink) == []
    assert unit(sink, epoch, 50, 60, *effects)
    tables = told(sink)["tables"]
    assert [len(tables[name]["files"]) for name in ("public.t", "public.u")] == [1, 1]


@pytest.mark.parametrize("place", ["after-entry", "before-manifest", "in-manifest"])
def test_what_a_crash_leaves_untold_is_told_by_the_next_run(
    sink: FilesSink, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = sink.take_epoch("me")
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        unit(sink, epoch, 50, 60, effect(change("i", 60, *ROW)))
    monkeypatch.delenv(VARIABLE)
    assert told(sink)["tables"]["public.t"]["files"] == []
    assert len(events(sink)) == 1, "it is committed"
    epoch = sink.take_epoch("next")
    assert len(told(sink)["tables"]["public.t"]["files"]) == len(paths(sink)) == 1
    assert not unit(sink, epoch, 50, 60, effect(change("i", 60, *ROW)))
    sink.sweep(epoch)
    assert len(data_files(sink)) == 1


def test_a_read_that_fails_leaves_no_file(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")

    def failing() -> Iterator[pa.RecordBatch]:
        yield from rows(ROW)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        sink.write_chunk(epoch, TARGET, CHUNKS[0], ORIGIN, GivenRows(failing(), watermark))
    assert data_files(sink) == []


def test_rows_that_were_read_before_the_stream_went_on_are_not_committed(sink: FilesSink) -> None:
    epoch = sink.take_epoch("me")
    written = sink.write_chunk(epoch, TARGET, CHUNKS[0], ORIGIN, GivenRows(rows(ROW), watermark))
    unit(sink, epoch, 50, 60)
    with pytest.raises(StagingLost):
        sink.commit_chunks(epoch, [CopiedChunk(TARGET, CHUNKS[0], ORIGIN, written)])


def test_an_added_column_is_in_the_files_from_then_on(parquet: FilesSink) -> None:
    epoch = parquet.take_epoch("me")
    unit(parquet, epoch, 50, 60, effect(change("i", 60, *ROW)))
    after = Target(table(ID, BODY, AT, column("more", "integer", 4)), "public", "t")
    parquet.redefine(epoch, TARGET, after)
    unit(parquet, epoch, 60, 70, effect(change("i", 70, "2", None, None, "7")))
    assert [e["more"] for e in events(parquet, after)] == [None, "7"]
    query = f"SELECT id, more FROM read_parquet({paths(parquet)}, union_by_name = true) ORDER BY id"
    assert duckdb.sql(query).fetchall() == [(1, None), (2, 7)]
    dropped = Target(table(ID, AT, column("more", "integer", 4)), "public", "t")
    parquet.redefine(epoch, after, dropped)
    unit(parquet, epoch, 70, 80, effect(change("i", 80, "3", None, "8")))
    assert "body" not in pq.read_schema(paths(parquet)[-1]).names


@pytest.mark.parametrize(
    "columns",
    [
        (ID, BODY, AT, column("more", "integer", 4, missing="7")),
        (ID, replace(BODY, name="text"), AT),
        (ID, replace(BODY, type="bytea"), AT),
    ],
)
def test_what_would_leave_other_values_in_the_changelog_is_read_again(
    parquet: FilesSink, columns: Sequence[Column]
) -> None:
    epoch = parquet.take_epoch("me")
    unit(parquet, epoch, 50, 60, effect(change("i", 60, *ROW)))
    with pytest.raises(RowsNeeded):
        parquet.redefine(epoch, TARGET, Target(table(*columns), "public", "t"))
    assert parquet.record() is not None
    assert cast(Any, parquet.record()).targets == (TARGET,)


def test_another_type_begins_another_version(parquet: FilesSink) -> None:
    epoch = parquet.take_epoch("me")
    unit(parquet, epoch, 50, 60, effect(change("i", 60, *ROW)))
    after = Target(table(ID, replace(BODY, type="integer"), AT), "public", "t")
    parquet.replace(epoch, after, None, GivenRows(rows(("1", "11", None)), watermark), TARGET)
    unit(parquet, epoch, 60, 70, effect(change("i", 70, "2", "22", None)))
    now = told(parquet)["tables"]["public.t"]
    assert (now["version"], len(now["earlier"]), len(now["files"])) == (2, 1, len(paths(parquet)))
    assert all("/v2/_date=" in file["path"] for file in now["files"])
    query = f"SELECT _op, id, body FROM read_parquet({paths(parquet)}) ORDER BY _commit_lsn, _seq"
    assert duckdb.sql(query).fetchall() == [("t", None, None), ("r", 1, 11), ("i", 2, 22)]
    assert [e["_op"] for e in events(parquet, after)] == ["t", "r", "i"]


def test_a_value_that_a_type_cannot_hold_is_refused(parquet: FilesSink) -> None:
    epoch = parquet.take_epoch("me")
    with pytest.raises(LimitExceeded, match=r"public\.t\.at"):
        unit(parquet, epoch, 50, 60, effect(change("i", 60, "1", None, "infinity")))
    assert data_files(parquet) == []


def test_a_column_that_has_the_name_of_the_partitions_is_refused(tmp_path: Path) -> None:
    sink = FilesSink(Storage(str(tmp_path)), "shop", "changelog")
    with pytest.raises(ConfigError, match="_date"):
        sink.prepare([Target(table(ID, column("_date", "date", 2)), "public", "t")], CHUNKS, SOURCE, 50)


@pytest.mark.parametrize("name", ["_airflow_cdc", "..", ".hidden", "a/b", "50% *[x]?", "Größe", "a.b", "shop.json"])
def test_names_of_all_kinds_are_folders(tmp_path: Path, name: str) -> None:
    target = Target(replace(TARGET.table, schema=name, name=name), name, name)
    sink = FilesSink(Storage(str(tmp_path / "lake")), "shop", "changelog")
    sink.prepare([target], [Chunk(f"{name}.{name}", 0, None, None)], SOURCE, 50)
    epoch = sink.take_epoch("me")
    assert chunk(sink, epoch, Chunk(f"{name}.{name}", 0, None, None), ROW, target=target) == 1
    (file,) = told(sink)["tables"][f"{name}.{name}"]["files"]
    assert duckdb.sql(f"SELECT count(*) FROM read_parquet({[file['path']]})").fetchall() == [(1,)]
    assert len(data_files(sink)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["lake"]


@pytest.mark.parametrize("file", ["_manifest/public/t.txt", "_manifest/shop.json"])
def test_what_a_process_has_put_back_when_it_wakes_up_it_publishes_anew(
    sink: FilesSink, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """It is halted before it replaces a file, until the stream, in another process, has published a newer version."""
    epoch = sink.take_epoch("me")
    unit(sink, epoch, 50, 51, effect(change("i", 51, "1", None, None)))
    streams: dict[Any, Any] = dict(manifest._listed)
    replaced = Storage.replace

    def after_standing_still(place: Storage, name: str, data: bytes) -> None:
        if name == file:
            monkeypatch.undo()
            with switched_to(streams):
                unit(sink, epoch, 51, 52, effect(change("i", 52, "2", None, None)))
            assert len(paths(sink)) == 2
        replaced(place, name, data)

    monkeypatch.setattr(Storage, "replace", after_standing_still)
    with switched_to({}):
        assert sink.append_without_epoch("an entry", lambda contents: Commit(Change({"others": {"n": 1}})))
        sink.publish()
    assert len(paths(sink)) == len(told(sink)["tables"]["public.t"]["files"]) == 2
    with switched_to(streams):
        unit(sink, epoch, 52, 60)
    assert len(paths(sink)) == len(told(sink)["tables"]["public.t"]["files"]) == 2
    assert told(sink)["applied"] == "0/3C"


@contextmanager
def switched_to(cache: dict[Any, Any]) -> Iterator[None]:
    """Act as the process that remembers having written the contents of ``cache``."""
    before = dict(manifest._listed)
    manifest._listed.clear()
    manifest._listed.update(cache)
    yield
    cache.clear()
    cache.update(manifest._listed)
    manifest._listed.clear()
    manifest._listed.update(before)


def test_lists_that_a_process_has_left_behind_are_put_right_with_the_manifest(sink: FilesSink) -> None:
    """It dies after it has put back the list and the manifest."""
    epoch = sink.take_epoch("me")
    unit(sink, epoch, 50, 51, effect(change("i", 51, "1", None, None)))
    names = ("_manifest/public/t.txt", "_manifest/shop.json")
    older = {name: sink.root.read(name) or b"" for name in names}
    unit(sink, epoch, 51, 52, effect(change("i", 52, "2", None, None)))
    for name, text in older.items():
        sink.root.replace(name, text)
    unit(sink, epoch, 52, 60)
    assert len(paths(sink)) == len(told(sink)["tables"]["public.t"]["files"]) == 2


def test_a_place_that_cannot_be_written_is_told_by_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = FilesSink(Storage(str(tmp_path / "file")), "shop", "changelog")
    with pytest.raises(CdcError) as told_:
        sink.prepare([TARGET], CHUNKS, SOURCE, 50)
    assert told_.value.solution
