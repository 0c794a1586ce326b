"""Writes rows read from the source's tables to a Delta sink: chunks of a snapshot, and re-reads."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import ConfigError, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import parse_lsn
from airflow_cdc_provider.engine.core.record import Target, Watermark
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.postgres.typed_values import arrow_type, to_texts
from airflow_cdc_provider.engine.sinks.delta import staging_files
from airflow_cdc_provider.engine.sinks.delta.record import Decided
from airflow_cdc_provider.engine.sinks.delta.spark_errors import (
    SPARK_ERRORS,
    examination_failure,
    examining_tables,
    first_line,
    is_one_of,
)
from airflow_cdc_provider.engine.sinks.delta.table_layout import quoted, require_possible
from airflow_cdc_provider.engine.sinks.delta.table_work import StagedFiles, TableWork, is_made, joined
from airflow_cdc_provider.engine.sinks.delta.views import DeltaViews
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.read_position import read_position
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents
from airflow_cdc_provider.engine.sinks.staged import CopiedChunk

_CHUNKS_AT_ONCE = 64
"""Maximum number of chunks that are committed together, so that no commit takes very long."""


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk that waits for its commit.

    :param file: file of its rows, below the pipeline's directory.
    """

    file: str
    rows: int
    watermark: Watermark


@dataclass(frozen=True)
class DeltaReads(DeltaViews):
    """The part of a Delta sink that writes rows read from the source."""

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: ServerIdentity,
        rows: SourceRows,
    ) -> WrittenChunk | None:
        """Stage the rows of a chunk in a file."""
        if not self._is_open(self._contents(epoch), chunk, origin):
            return None
        file = f"staging/chunks/{epoch}/{uuid.uuid4().hex}.parquet"
        failpoint("before-chunk-staged")
        count = self._write_rows(file, target, rows.batches())
        failpoint("after-chunk-staged")
        watermark = rows.finish()
        failpoint("before-chunk-prepared")
        return WrittenChunk(file, count, watermark)

    def commit_chunks(self, epoch: int, copied: Sequence[CopiedChunk]) -> Sequence[int | None]:
        """Commit chunks together, with one or few commits per table."""
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
        """Require that the driver finds the file that an executor has staged, before anything is decided."""
        found = staging_files.staged_rows(self._home, file)
        if found != rows:
            raise StagingLost(
                f"{rows} rows were staged for {label} in {self._home.location(file)},"
                f" {'which does not exist' if found is None else f'which has {found}'}",
                "Start again: the rows are staged again. Make sure that the path is the same directory on the driver"
                " and on all executors.",
            )

    def _chunk_work(self, contents: Contents, copied: CopiedChunk, removals: str | None) -> TableWork:
        """Return the work of a chunk on its table; a chunk without bounds replaces all rows.

        :param removals: as for :meth:`_events`.
        """
        target, file = copied.target, copied.written.file
        label, whole = target.table.label, copied.chunk.whole
        create = whole or not is_made(contents, label)
        if not create:
            self._require_there(target)
        if self.mode == "changelog":
            return TableWork(label, "append", self._events(contents, target, removals, file), create=create)
        return TableWork(label, "replace" if whole else "append", (StagedFiles((file,)),), create=create)

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        rows: SourceRows,
        before: Target | None,
    ) -> int:
        """Commit a re-read: rows that were read replace those with the same keys, or all rows."""
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
            rows = rows.changed(partial(self._only_members, target, keys))
        batches = rows.batches()
        if keys is not None and self.mode == "mirror":
            table = target.table
            typed = (staging_files.written(table, staging_files.typed_rows(table, batch)) for batch in batches)
            count = staging_files.write(self._home, file, staging_files.effect_schema(table), typed)
            gone = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
            staging_files.write(
                self._home, gone, staging_files.effect_schema(table), [staging_files.erasures(table, sorted(keys))]
            )
            parts: tuple[StagedFiles, ...] = (StagedFiles((gone,)), StagedFiles((file,)))
        else:
            count = self._write_rows(file, target, batches)
            parts = (StagedFiles((file,)),)
        watermark = rows.finish()

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
            then = record_contents.reread(contents, target, keys, watermark, count)
            if before is not None:
                then += self._views_following(contents, [(before, target)])
            return [work], then

        self._commit(epoch, f"{label} read again", decide)
        failpoint("after-reread-commit")
        return count

    def check_condition(self, target: Target, where: str) -> None:
        """Check a condition on a mirror's rows; in a changelog, only the source's keys are used."""
        if self.mode == "mirror":
            with self._matching(target, where):
                pass

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of a mirror's rows that match a condition."""
        if self.mode == "changelog":
            return frozenset()
        with self._matching(target, where) as found:
            return key_texts(found.toArrow())

    @contextmanager
    def _matching(self, target: Target, where: str) -> Iterator[Any]:
        """Yield the keys of the rows that match a condition; the condition may also fail on a value."""
        with examining_tables():
            rows = self._table(target).read()
        try:
            yield rows.where(where).select(*map(quoted, target.table.key))
        except SPARK_ERRORS as e:
            if is_one_of(["FAILED_READ_FILE"], e):
                raise examination_failure(e) from e
            raise ConfigError(
                f"--where {where!r} is not a condition that Spark can evaluate on rows of"
                f" {target.schema}.{target.name}: {first_line(e)}",
                "Give an SQL condition that Postgres and Spark both understand, or omit `--where`.",
            ) from e

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """Match keys against the keys of re-reads by value; only minus zero differs in its text."""
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
        """Remove rows that the source has found under another text of a key, because that is another key here."""
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

    def _events(self, contents: Contents, target: Target, removals: str | None, file: str) -> tuple[StagedFiles, ...]:
        """Return the events of rows that were read, at the applied LSN, after earlier reads at the same LSN.

        :param removals: file of events before them, used unless the changelog is empty.
        """
        applied, table = parse_lsn(contents["head"]["applied"]), self._table(target)
        last, replacing = None, removals is not None and table.exists() and not table.empty()
        if replacing:
            found = table.read().where(f"_commit_lsn = {applied} AND _seq < 1").selectExpr("max(_seq)").first()
            last = found[0] if found is not None else None
        position = read_position(applied, last, replacing)
        rows = StagedFiles((file,), {"op": "r", "commit_lsn": applied, "seq": position.seq})
        if removals is None or position.marker is None:
            return (rows,)
        now = int(time.time() * 1_000_000)
        return StagedFiles((removals,), {"commit_lsn": applied, "seq": position.marker, "commit_ts": now}), rows


def key_texts(found: pa.Table) -> frozenset[tuple[str, ...]]:
    """Return the keys in the rows of a table, as texts."""
    columns = [to_texts(column.combine_chunks()).to_pylist() for column in found.columns]
    return frozenset(zip(*columns, strict=True))
