"""The Delta sink: mirror and changelog tables in Delta Lake, written by Spark.

Delta has no transactions across tables. So a commit is an entry in the pipeline's log, see :mod:`..lake.record`, which
says which staged files go into which tables. The entry is then applied with one commit per table, which records the
entry's number, so that it takes effect once however often it is tried. After a crash the next run first completes such
an entry, so that a decided unit is never read again. Executors write Parquet files; everything that needs Spark SQL
runs on the driver.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.comparison.fetched_side import row_sides
from airflow_cdc_provider.engine.comparison.side import RowKey, Sides
from airflow_cdc_provider.engine.core.effect import MISSING, Effect
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.array_text import array_texts
from airflow_cdc_provider.engine.postgres.connection import Connection
from airflow_cdc_provider.engine.postgres.typed_values import TEXT, arrow_type, to_texts, to_typed
from airflow_cdc_provider.engine.sinks.delta import net_effect, staging_files
from airflow_cdc_provider.engine.sinks.delta.delta_table import DeltaTable
from airflow_cdc_provider.engine.sinks.delta.reads import DeltaReads, key_texts
from airflow_cdc_provider.engine.sinks.delta.record import Decided
from airflow_cdc_provider.engine.sinks.delta.spark_errors import examining_tables
from airflow_cdc_provider.engine.sinks.delta.table_definition import plan
from airflow_cdc_provider.engine.sinks.delta.table_layout import location, quoted, require_possible
from airflow_cdc_provider.engine.sinks.delta.table_work import StagedFiles, TableWork, is_made
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents
from airflow_cdc_provider.engine.sinks.staged import MissingValues, Staged, StagedPiece


@dataclass(frozen=True)
class DeltaSink(DeltaReads):
    """The tables of a pipeline in Delta Lake; see :class:`.contract.Sink` and, for the fields,
    :class:`.DeltaRecord`.
    """

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """Change a target table like its source table."""
        failpoint("before-redefinition")
        require_possible(self.layout, after, self.mode)

        def decide(contents: Contents) -> Decided:
            then = record_contents.redefined(after) + self._views_following(contents, [(before, after)])
            if not is_made(contents, before.table.label) and self._is_gone(before):
                return [], then  # the table is created in this form with its first rows
            self._require_there(before)
            found = plan(before, after, self._present(before), self.mode, rows_stay=True)
            if not found.alterations:
                return [], then
            work = TableWork(
                after.table.label,
                "fill" if found.values else "alter",
                alterations=found.alterations,
                values=found.values,
                target=after,
            )
            return [work], then

        self._commit(epoch, f"{after.table.label} redefined", decide)
        failpoint("after-redefinition")

    # -- stream units -------------------------------------------------------------------------------

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """Stage effects in Parquet files."""
        if not effects:
            return ()
        targets = record_contents.targets_of(self._contents(epoch))
        staged = []
        for number, effect in enumerate(effects):
            file = None
            if effect.rows.num_rows:
                file = f"staging/units/{epoch}/{attempt}_{number}.parquet"
                table = targets[effect.label].table
                if self.mode == "mirror":
                    typed, schema = staging_files.typed_effect(table, effect.rows), staging_files.effect_schema(table)
                else:
                    typed, schema = staging_files.typed_events(table, effect.rows), staging_files.event_schema(table)
                staging_files.write(self._home, file, schema, [typed])
            columns = tuple(effect.rows.column_names)
            staged.append(Staged(effect.label, file, effect.rows.num_rows, effect.truncate, columns))
            failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: LogPosition,
        end: LogPosition,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """Commit a unit: append an entry to the log, then apply it to the tables."""
        failpoint("before-batch-commit")

        def decide(contents: Contents) -> Decided | None:
            if not self._is_next(contents, start, end, pieces):
                return None
            tables = self._unit(epoch, contents, pieces)
            failpoint("in-batch-commit")
            return tables, record_contents.unit_applied(contents, end, time.time(), noted)

        committed = self._commit(epoch, f"unit ({format_lsn(start)}, {format_lsn(end)}]", decide)
        for piece in pieces:
            for staged in piece.tables:
                if staged.relation is not None:
                    self._home.remove(staged.relation)
        failpoint("after-batch-commit")
        return committed

    def _unit(self, epoch: int, contents: Contents, pieces: Sequence[StagedPiece]) -> list[TableWork]:
        """Return the work of a unit on each table.

        :raises MissingValues: when values are missing everywhere.
        :raises StagingLost: when files are gone.
        """
        targets = record_contents.targets_of(contents)
        tables: dict[str, list[Staged]] = {}
        for piece in sorted(pieces, key=lambda p: p.index):
            for staged in piece.tables:
                if staged.relation is not None:
                    self._check_staged(staged.label, staged.relation, staged.rows)
                tables.setdefault(staged.label, []).append(staged)
        missing: dict[str, frozenset[tuple[str, ...]]] = {}
        works = []
        for label, layers in tables.items():
            create = not is_made(contents, label)
            if not create:
                self._require_there(targets[label])
            if self.mode == "changelog":
                files = tuple(staged.relation for staged in layers if staged.relation is not None)
                if files:
                    works.append(TableWork(label, "append", (StagedFiles(files),), create=create))
                continue
            last = max((n for n, staged in enumerate(layers) if staged.truncate), default=0)
            emptied = layers[last].truncate
            layers = [staged for staged in layers[last:] if staged.relation is not None]
            parts = tuple(StagedFiles((staged.relation,)) for staged in layers if staged.relation is not None)
            if any(MISSING in staged.columns for staged in layers):
                file, unknown = self._net(epoch, targets[label], parts, emptied)
                parts = (StagedFiles((file,)),)
                if unknown:
                    missing[label] = unknown
            works.append(TableWork(label, "merge", parts, emptied=emptied, create=create))
        if missing:
            raise MissingValues(missing)
        return works

    def _net(
        self, epoch: int, target: Target, parts: Sequence[StagedFiles], emptied: bool
    ) -> tuple[str, frozenset[tuple[str, ...]]]:
        """Write the net effect of pieces, completed with values that were not sent.

        :returns: the name of the written directory, and the keys of rows whose values are missing everywhere.
        """
        table = self._table(target)
        names = [column.name for column in target.table.columns]
        folded = net_effect.folded(table.effects([part.files for part in parts]), table.key, len(names))
        there = None if emptied or not table.exists() else table.read()
        filled = net_effect.filled(folded, there, names, table.key)
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}"
        filled.write.parquet(location(self._home / file))
        unknown = table.spark.read.parquet(location(self._home / file)).where(net_effect.UNKNOWN)
        return file, key_texts(unknown.select(*(f"c{i}" for i in table.key)).toArrow())

    # -- reading ------------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """Return both sides of a comparison."""
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[RowKey] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the captured columns of a mirror's rows as texts, of one version of the table; of a changelog the
        events.

        :param keys: keys of the rows; ``None`` for all rows.
        """
        table = self._table(target)
        names = [column.name for column in target.table.columns]
        if self.mode == "changelog":
            names += ["_op", "_commit_lsn", "_seq", "_before", "_unchanged"]
        with examining_tables():
            found = table.read().select(*map(quoted, names))
            if keys is not None and self.mode == "mirror":
                found = found.join(self._keys(table, keys), list(target.table.key), "left_semi")
                found = found.select(*map(quoted, names))
        # Goes through files, so that the number of rows is unlimited.
        table.spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        place = self._home / "reading" / uuid.uuid4().hex
        try:
            with examining_tables():
                found.toDF(*(f"c{i}" for i in range(len(names)))).write.parquet(location(place))
            for file in place.names():
                if file.endswith(".parquet"):
                    with place.reading(file) as opened:
                        for batch in pq.ParquetFile(opened).iter_batches():
                            yield _texts(batch, names)
        finally:
            place.remove()

    def _keys(self, table: DeltaTable, keys: Sequence[RowKey]) -> Any:
        columns = zip(*keys, strict=True)
        typed = {
            column.name: to_typed(
                pa.array(texts, TEXT), arrow_type(column), f"{table.target.table.label}.{column.name}"
            )
            for column, texts in zip(table.target.table.key_columns, columns, strict=True)
        }
        return table.spark.createDataFrame(pa.table(typed))


def _texts(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return a batch of the table's values in the text format of Postgres."""
    columns = zip(names, batch.columns, strict=True)
    arrays = [_column_texts(name, column).cast(pa.string()) for name, column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _column_texts(name: str, column: pa.Array) -> pa.Array:
    if name == "_commit_lsn" and pa.types.is_integer(column.type):
        return pa.array([format_lsn(lsn) for lsn in column.to_pylist()], TEXT)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return pa.array([None if each is None else _array_text(each) for each in column.to_pylist()], TEXT)
    return to_texts(column)


def _array_text(elements: Sequence[str]) -> str:
    return str(array_texts([pa.array([each]) for each in elements])[0].as_py())
