"""Rows that a Delta sink gets from the source's tables: chunks of a snapshot, and re-reads."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.postgres.server_identity import Origin
from airflow_cdc_provider.engine.postgres.typed_values import arrow_type, to_texts
from airflow_cdc_provider.engine.sinks.delta import staging_files
from airflow_cdc_provider.engine.sinks.delta.record import Decided, DeltaRecord
from airflow_cdc_provider.engine.sinks.delta.spark_errors import (
    SPARK_ERRORS,
    first_line,
    is_one_of,
    looking,
    not_looked_at,
)
from airflow_cdc_provider.engine.sinks.delta.table_layout import quoted, require_possible
from airflow_cdc_provider.engine.sinks.delta.table_work import Part, TableWork, is_made, joined
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.read_position import room_at
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk

_CHUNKS_AT_ONCE = 64
"""So many chunks are committed together at most, so that no commit takes very long."""


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk that waits for its commit.

    :param file: its rows, below the pipeline's folder.
    """

    file: str
    rows: int
    watermark: Watermark


@dataclass(frozen=True)
class DeltaReads(DeltaRecord):
    """The part of a Delta sink that takes rows which were read."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> WrittenChunk | None:
        """See :meth:`.contract.Sink.write_chunk`."""
        if not self._is_open(self._contents(epoch), chunk, origin):
            return None
        file = f"staging/chunks/{epoch}/{uuid.uuid4().hex}.parquet"
        failpoint("before-chunk-staged")
        rows = self._write_rows(file, target, batches)
        failpoint("after-chunk-staged")
        watermark = finish()
        failpoint("before-chunk-prepared")
        return WrittenChunk(file, rows, watermark)

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """See :meth:`.contract.Sink.commit_chunks`: in one commit of each table, or few."""
        groups = (copied[n : n + _CHUNKS_AT_ONCE] for n in range(0, len(copied), _CHUNKS_AT_ONCE))
        return [rows for group in groups for rows in self._commit_together(epoch, group)]

    def _commit_together(self, epoch: int, copied: Sequence[CopiedChunk]) -> list[int | None]:
        removals = {
            each.chunk: self._stage_removals(epoch, each.target, None)
            for each in copied
            if self.mode == "changelog" and each.chunk.whole
        }
        chosen: list[CopiedChunk] = []

        def decide(contents: Contents) -> Decided | None:
            chosen[:] = [each for each in copied if self._is_open(contents, each.chunk, each.origin)]
            if not chosen:
                return None
            failpoint("before-chunk-commit")
            then = Change()
            works: dict[str, TableWork] = {}
            for each in chosen:
                written: WrittenChunk = each.written
                self._check_staged(each.target.table.label, written.file, written.rows)
                then += record_contents.chunk_committed(each.chunk, written.watermark, written.rows, epoch)
                work = self._chunk_work(contents, each, removals.get(each.chunk))
                before = works.get(work.label)
                works[work.label] = work if before is None else replace(before, parts=joined(before.parts + work.parts))
            return list(works.values()), then

        title = ", ".join(each.chunk.title for each in copied)
        committed = self._commit(epoch, f"chunk {title}", decide)
        for file in (*(each.written.file for each in copied), *removals.values()):
            self._home.remove(file)
        failpoint("after-chunk-commit")
        return [each.written.rows if committed and each in chosen else None for each in copied]

    def _check_staged(self, label: str, file: str, rows: int) -> None:
        """Look, before anything is decided for it, whether the driver finds what an executor has staged."""
        found = staging_files.staged_rows(self._home, file)
        if found != rows:
            raise StagingLost(
                f"{rows} rows were staged for {label} in {self._home.location(file)},"
                f" {'which is gone' if found is None else f'{found} are there'}",
                "Start again: they are staged anew. A path has to be the same folder on the driver and on all"
                " executors.",
            )

    def _chunk_work(self, contents: Contents, copied: CopiedChunk, removals: str | None) -> TableWork:
        """What a chunk is to its table; one without bounds takes the place of all rows.

        :param removals: as for :meth:`_events`.
        """
        target, file = copied.target, copied.written.file
        label, whole = target.table.label, copied.chunk.whole
        create = whole or not is_made(contents, label)
        if not create:
            self._require_there(target)
        if self.mode == "changelog":
            return TableWork(label, "append", self._events(contents, target, removals, file), create=create)
        return TableWork(label, "replace" if whole else "append", (Part((file,)),), create=create)

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.contract.Sink.replace`."""
        contents = self._contents(epoch)
        label = target.table.label
        if before is None:
            self._check([target], record_contents.targets_of(contents))
        require_possible(self.layout, target, self.mode)
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
        removals = None
        if self.mode == "changelog":
            removals = self._stage_removals(epoch, target, keys)
        if keys is not None:
            batches = (self._only_members(target, keys, batch) for batch in batches)
        if keys is not None and self.mode == "mirror":
            table = target.table
            typed = (staging_files.written(table, staging_files.typed_rows(table, batch)) for batch in batches)
            rows = staging_files.write(self._home, file, staging_files.effect_schema(table), typed)
            gone = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
            staging_files.write(
                self._home, gone, staging_files.effect_schema(table), [staging_files.erasures(table, sorted(keys))]
            )
            parts: tuple[Part, ...] = (Part((gone,)), Part((file,)))
        else:
            rows = self._write_rows(file, target, batches)
            parts = (Part((file,)),)
        watermark = finish()

        def decide(contents: Contents) -> Decided:
            failpoint("before-reread-commit")
            create = keys is None or not is_made(contents, label)
            if not create:
                self._require_there(target)
            work = TableWork(label, "merge", parts, create=create, target=target)
            if self.mode == "changelog":
                work = TableWork(
                    label,
                    "append",
                    self._events(contents, target, removals, file),
                    create=create,
                    alterations=self._altered(before, target).alterations if before is not None else (),
                    target=target,
                )
            elif keys is None:
                work = TableWork(label, "replace", parts, create=True, target=target)
            return [work], record_contents.reread(contents, target, keys, watermark, rows)

        self._commit(epoch, f"{label} read again", decide)
        failpoint("after-reread-commit")
        return rows

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.contract.Sink.check_condition`; in a changelog rows are found by the source's keys alone."""
        if self.mode == "mirror":
            with self._matching(target, where):
                pass

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.contract.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        with self._matching(target, where) as found:
            return key_texts(found.toArrow())

    @contextmanager
    def _matching(self, target: Target, where: str) -> Iterator[Any]:
        """The keys of the rows under a condition, which may also fail on the value of one of them."""
        with looking():
            rows = self._table(target).read()
        try:
            yield rows.where(where).select(*map(quoted, target.table.key))
        except SPARK_ERRORS as e:
            if is_one_of(["FAILED_READ_FILE"], e):
                raise not_looked_at(e) from e
            raise ConfigError(
                f"--where {where!r} is not a condition that Spark can tell of rows of {target.schema}.{target.name}:"
                f" {first_line(e)}",
                "Give an SQL condition that Postgres and Spark both understand, or leave --where out.",
            ) from e

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.contract.Sink.members`: keys are one if their values are; minus zero has another text."""
        kinds = [arrow_type(column) for column in target.table.key_columns]

        def normal(texts: Sequence[str]) -> tuple[str, ...]:
            pairs = zip(texts, kinds, strict=True)
            return tuple("0" if text == "-0" and pa.types.is_floating(kind) else text for text, kind in pairs)

        places: dict[tuple[str, ...], list[int]] = {}
        for place, member in enumerate(members):
            places.setdefault(normal(member), []).append(place)
        asked = map(normal, zip(*(column.to_pylist() for column in keys), strict=True))
        return [(n, place) for n, key in enumerate(asked) for place in places.get(key, ())]

    def _only_members(self, target: Target, keys: frozenset[tuple[str, ...]], batch: pa.RecordBatch) -> pa.RecordBatch:
        """Leave out rows that the source has found under another text of a key, which is another key here."""
        names = [column.name for column in target.table.columns]
        found = np.zeros(batch.num_rows, dtype=bool)
        columns = [batch.column(names.index(name)) for name in target.table.key]
        found[[place for place, _ in self.members(target, sorted(keys), columns)]] = True
        return batch.filter(pa.array(found))

    def _write_rows(self, file: str, target: Target, batches: Iterator[pa.RecordBatch]) -> int:
        typed = (staging_files.typed_rows(target.table, batch) for batch in batches)
        return staging_files.write(self._home, file, staging_files.row_schema(target.table), typed)

    def _stage_removals(self, epoch: int, target: Target, keys: frozenset[tuple[str, ...]] | None) -> str:
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
        events = staging_files.removals(target.table, None if keys is None else sorted(keys))
        staging_files.write(self._home, file, staging_files.event_schema(target.table), [events])
        return file

    def _events(self, contents: Contents, target: Target, removals: str | None, file: str) -> tuple[Part, ...]:
        """The events of rows that were read: at the applied LSN, after all that was read at the same LSN before.

        :param removals: events that come before them, unless the changelog is empty.
        """
        applied, table = parse_lsn(contents["head"]["applied"]), self._table(target)
        last, replacing = None, removals is not None and table.exists() and not table.empty()
        if replacing:
            found = table.read().where(f"_commit_lsn = {applied} AND _seq < 1").selectExpr("max(_seq)").first()
            last = found[0] if found is not None else None
        room = room_at(applied, last, replacing)
        rows = Part((file,), {"op": "r", "commit_lsn": applied, "seq": room.seq})
        if removals is None or room.marker is None:
            return (rows,)
        now = int(time.time() * 1_000_000)
        return Part((removals,), {"commit_lsn": applied, "seq": room.marker, "commit_ts": now}), rows


def key_texts(found: pa.Table) -> frozenset[tuple[str, ...]]:
    """The keys in the rows of a table, as texts."""
    columns = [to_texts(column.combine_chunks()).to_pylist() for column in found.columns]
    return frozenset(zip(*columns, strict=True))
