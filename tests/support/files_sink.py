"""A files sink with one table, and the calls that tests make on it in place of the engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.effect import Effect
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.sinks.files.settings import FileFormat
from airflow_cdc_provider.engine.sinks.files.sink import FilesSink
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk, StagedPiece
from tests.support.given_rows import GivenRows

ORIGIN = ServerIdentity("7", 1, 5)
SOURCE = {"system": "7", "timeline": 1, "database": 5}


def column(name: str, kind: str, number: int, missing: str | None = None) -> Column:
    return Column(name, kind, 0, None, False, True, attnum=number, missing=missing)


def table(*columns: Column, name: str = "t") -> Table:
    return Table(10, "public", name, columns, ("id",), "d", None, (Leaf(10, "public", name),), "r")


ID, BODY, AT = column("id", "bigint", 1), column("body", "text", 2), column("at", "timestamp with time zone", 3)
TARGET = Target(table(ID, BODY, AT), "public", "t")
CHUNKS = (Chunk("public.t", 0, None, ("5",)), Chunk("public.t", 1, ("5",), None))
DAY = 86_400_000_000


def watermark(high: int = 100) -> Watermark:
    return Watermark(Snapshot(10, 20), high)


def rows(*values: Sequence[str | None]) -> Iterator[pa.RecordBatch]:
    names = [f"f{i}" for i in range(len(values[0]))]
    yield pa.RecordBatch.from_arrays([pa.array(c, pa.string()) for c in zip(*values, strict=True)], names=names)


def effect(*events: dict[str, Any], label: str = "public.t") -> Effect:
    kinds = {"op": pa.string(), "commit_lsn": pa.int64(), "seq": pa.int64(), "xid": pa.int64(), "commit_ts": pa.int64()}
    names = list(dict.fromkeys(name for event in events for name in event))
    columns = {n: pa.array([e.get(n) for e in events], kinds.get(n, pa.large_string())) for n in names}
    return Effect(label, False, pa.table(columns))


def change(op: str, lsn: int, *values: str | None, seq: int = 1, ts: int = DAY, **more: Any) -> dict[str, Any]:
    event = {"op": op, "commit_lsn": lsn, "seq": seq, "xid": 7, "commit_ts": ts}
    return event | {f"c{i}": value for i, value in enumerate(values)} | more


def unit(sink: FilesSink, epoch: int, start: int, end: int, *effects: Effect) -> bool:
    staged = sink.stage(epoch, uuid.uuid4().hex, effects)
    piece = StagedPiece("", "", 0, 0, b"", staged, frozenset(), 1 << 40)
    return sink.commit(epoch, start, end, [piece])


def chunk(sink: FilesSink, epoch: int, which: Chunk, *values: Sequence[str | None], target: Target = TARGET) -> Any:
    written = sink.write_chunk(epoch, target, which, ORIGIN, GivenRows(rows(*values), watermark))
    return None if written is None else sink.commit_chunks(epoch, [CopiedChunk(target, which, ORIGIN, written)])[0]


def told(sink: FilesSink) -> dict[str, Any]:
    """Return the list of files for readers."""
    found = sink.root.read(f"_manifest/{sink.pipeline}.json")
    assert found is not None
    return cast("dict[str, Any]", json.loads(found))


def paths(sink: FilesSink, name: str = "public/t") -> list[str]:
    return (sink.root.read(f"_manifest/{name}.txt") or b"").decode().splitlines()


def events(sink: FilesSink, target: Target = TARGET) -> list[dict[str, Any]]:
    found = [event for batch in sink.rows(target) for event in batch.to_pylist()]
    return sorted(found, key=lambda event: (event["_commit_lsn"], int(event["_seq"]), str(event["id"])))


def data_files(sink: FilesSink) -> list[str]:
    return [name for name in sink.root.files() if not name.startswith("_")]


STORES = ("parquet", "json", "memory", pytest.param("hdfs", marks=pytest.mark.slow))


@contextmanager
def unused(store: str, request: pytest.FixtureRequest) -> Iterator[FilesSink]:
    """Return a sink without a pipeline, in files of either format, in memory or in HDFS."""
    if store == "memory":
        root = Storage(f"memory://{uuid.uuid4().hex}")
    elif store == "hdfs":
        root = Storage(request.getfixturevalue("hdfs").url) / uuid.uuid4().hex
    else:
        root = Storage(str(request.getfixturevalue("tmp_path") / "lake"))
    format_: FileFormat = "json" if store == "json" else "parquet"
    yield FilesSink(root, "shop", "changelog", format_)
    root.remove()


@contextmanager
def provisioned(store: str, request: pytest.FixtureRequest) -> Iterator[FilesSink]:
    """Return such a sink with the table."""
    with unused(store, request) as found:
        found.prepare([TARGET], CHUNKS, SOURCE, 50)
        yield found
