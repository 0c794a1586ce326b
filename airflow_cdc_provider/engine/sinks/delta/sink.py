"""The Delta sink: mirror and changelog tables of Delta Lake, written by Spark.

Delta has no transaction across tables, so the commit is an entry of the pipeline's log, see :mod:`..lake.record`: it
says which staged files go into which tables. It is then carried out, by one commit of each table, which notes the
entry's number: once, whoever does it. After a crash the next run does that first, so that a unit that has been decided
never has to be read again. Executors write Parquet files; everything that takes Spark is done on the driver.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_cdc_provider.engine.arrays import array_texts
from airflow_cdc_provider.engine.chunks import Chunk
from airflow_cdc_provider.engine.connection import Connection
from airflow_cdc_provider.engine.effects import MISSING, Effect
from airflow_cdc_provider.engine.errors import (
    ConfigError,
    ForeignTable,
    GateClosed,
    StagingLost,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.failpoint import failpoint
from airflow_cdc_provider.engine.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.origin import Origin
from airflow_cdc_provider.engine.row_side import row_sides
from airflow_cdc_provider.engine.sides import Key, Sides
from airflow_cdc_provider.engine.sinks.base import MissingValues, Staged, StagedPiece, Target, Watermark
from airflow_cdc_provider.engine.sinks.delta import net, staging
from airflow_cdc_provider.engine.sinks.delta.definition import Plan, Present, plan
from airflow_cdc_provider.engine.sinks.delta.layout import Layout, location, quoted, require_possible, table_columns
from airflow_cdc_provider.engine.sinks.delta.spark import (
    SPARK_ERRORS,
    first_line,
    insistently,
    session,
    stands_in_the_way,
)
from airflow_cdc_provider.engine.sinks.delta.table import DeltaTable, has_log
from airflow_cdc_provider.engine.sinks.delta.work import Part, TableWork, is_made, made, of_step, to_json, unmade
from airflow_cdc_provider.engine.sinks.lake import changes
from airflow_cdc_provider.engine.sinks.lake.changes import Change, Contents, Step
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import Commit, LakeRecord
from airflow_cdc_provider.engine.sinks.lake.room import room_at
from airflow_cdc_provider.engine.sinks.lake.values import TEXT, arrow_type, to_texts, to_typed

log = logging.getLogger(__name__)

Decided = tuple[Sequence[TableWork], Change]
"""What is to be done to tables, and what the record says when that has been done."""

_TABLES_AT_ONCE = 4


@dataclass(frozen=True)
class WrittenChunk:
    """A chunk that waits for its commit.

    :param file: its rows, below the pipeline's folder.
    """

    file: str
    rows: int
    watermark: Watermark


@dataclass(frozen=True)
class DeltaSink(LakeRecord):
    """A pipeline's place among Delta tables; see :class:`.base.Sink` and, for its first fields, the record.

    :param conf: of Spark, where none runs yet.
    """

    layout: Layout
    conf: tuple[tuple[str, str], ...] = ()

    # -- chunks and re-reads ------------------------------------------------------------------------

    def write_chunk(
        self,
        epoch: int,
        target: Target,
        chunk: Chunk,
        origin: Origin,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
    ) -> WrittenChunk | None:
        """See :meth:`.base.Sink.write_chunk`."""
        if not self._is_open(self._contents(epoch), chunk, origin):
            return None
        file = f"staging/chunks/{epoch}/{uuid.uuid4().hex}.parquet"
        failpoint("before-chunk-staged")
        rows = self._write_rows(file, target, batches)
        failpoint("after-chunk-staged")
        watermark = finish()
        failpoint("before-chunk-prepared")
        return WrittenChunk(file, rows, watermark)

    def commit_chunk(
        self, epoch: int, target: Target, chunk: Chunk, origin: Origin, written: WrittenChunk
    ) -> int | None:
        """See :meth:`.base.Sink.commit_chunk`."""
        whole = chunk.lower is None and chunk.upper is None
        removals = self._stage_removals(epoch, target, None) if whole and self.mode == "changelog" else None

        def decide(contents: Contents) -> Decided | None:
            if not self._is_open(contents, chunk, origin):
                return None
            failpoint("before-chunk-commit")
            then = changes.chunk_committed(chunk, written.watermark, written.rows, epoch)
            label = target.table.label
            create = whole or not is_made(contents, label)
            if not create:
                self._require_there(target)
            if self.mode == "mirror":
                parts: tuple[Part, ...] = (Part((written.file,)),)
            else:
                parts = self._events(contents, target, removals, written.file)
            work = TableWork(label, "append", parts, create=create)
            if whole and self.mode == "mirror":
                work = TableWork(label, "replace", parts, create=True)
            return [work], then

        committed = self._commit(epoch, f"chunk {chunk.title}", decide)
        for file in (written.file, removals):
            if file is not None:
                self._home.remove(file)
        failpoint("after-chunk-commit")
        return written.rows if committed else None

    def replace(
        self,
        epoch: int,
        target: Target,
        keys: frozenset[tuple[str, ...]] | None,
        batches: Iterator[pa.RecordBatch],
        finish: Callable[[], Watermark],
        before: Target | None,
    ) -> int:
        """See :meth:`.base.Sink.replace`."""
        contents = self._contents(epoch)
        label = target.table.label
        if before is None:
            self._refuse_anothers(target)
            self._check_target(target, changes.targets_of(contents).get(label), False, None)
        require_possible(self.layout, target, self.mode)
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
        removals = None
        if self.mode == "changelog":
            removals = self._stage_removals(epoch, target, keys)
        if keys is not None:
            batches = (self._only_members(target, keys, batch) for batch in batches)
        if keys is not None and self.mode == "mirror":
            table = target.table
            typed = (staging.written(table, staging.typed_rows(table, batch)) for batch in batches)
            rows = staging.write(self._home, file, staging.effect_schema(table), typed)
            gone = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
            staging.write(self._home, gone, staging.effect_schema(table), [staging.erasures(table, sorted(keys))])
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
            return [work], changes.reread(contents, target, keys, watermark, rows)

        self._commit(epoch, f"{label} read again", decide)
        failpoint("after-reread-commit")
        return rows

    def redefine(self, epoch: int, before: Target, after: Target) -> None:
        """See :meth:`.base.Sink.redefine`."""
        failpoint("before-redefinition")
        require_possible(self.layout, after, self.mode)

        def decide(contents: Contents) -> Decided:
            if not is_made(contents, before.table.label) and self._is_gone(before):
                return [], changes.redefined(after)  # it is made so when its first rows come
            self._require_there(before)
            found = plan(before, after, self._present(before), self.mode, rows_stay=True)
            if not found.alterations:
                return [], changes.redefined(after)
            work = TableWork(
                after.table.label,
                "fill" if found.values else "alter",
                alterations=found.alterations,
                values=found.values,
                target=after,
            )
            return [work], changes.redefined(after)

        self._commit(epoch, f"{after.table.label} redefined", decide)
        failpoint("after-redefinition")

    def check_condition(self, target: Target, where: str) -> None:
        """See :meth:`.base.Sink.check_condition`; in a changelog rows are found by the source's keys alone."""
        if self.mode == "mirror":
            self._matching(target, where)

    def matching_keys(self, target: Target, where: str) -> frozenset[tuple[str, ...]]:
        """See :meth:`.base.Sink.matching_keys`."""
        if self.mode == "changelog":
            return frozenset()
        return _key_texts(self._matching(target, where).toArrow())

    def _matching(self, target: Target, where: str) -> Any:
        try:
            return self._table(target).read().where(where).select(*map(quoted, target.table.key))
        except SPARK_ERRORS as e:
            raise ConfigError(
                f"--where {where!r} is not a condition that Spark can tell of rows of {target.schema}.{target.name}:"
                f" {first_line(e)}",
                "Give an SQL condition that Postgres and Spark both understand, or leave --where out.",
            ) from e

    def members(
        self, target: Target, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]
    ) -> Sequence[tuple[int, int]]:
        """See :meth:`.base.Sink.members`: keys are one if their values are, of which minus zero has another text."""
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
        typed = (staging.typed_rows(target.table, batch) for batch in batches)
        return staging.write(self._home, file, staging.row_schema(target.table), typed)

    def _stage_removals(self, epoch: int, target: Target, keys: frozenset[tuple[str, ...]] | None) -> str:
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}.parquet"
        events = staging.removals(target.table, None if keys is None else sorted(keys))
        staging.write(self._home, file, staging.event_schema(target.table), [events])
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

    # -- stream units -------------------------------------------------------------------------------

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.base.Sink.stage`."""
        if not effects:
            return ()
        targets = changes.targets_of(self._contents(epoch))
        staged = []
        for number, effect in enumerate(effects):
            file = None
            if effect.rows.num_rows:
                file = f"staging/units/{epoch}/{attempt}_{number}.parquet"
                table = targets[effect.label].table
                if self.mode == "mirror":
                    typed, schema = staging.typed_effect(table, effect.rows), staging.effect_schema(table)
                else:
                    typed, schema = staging.typed_events(table, effect.rows), staging.event_schema(table)
                staging.write(self._home, file, schema, [typed])
            columns = tuple(effect.rows.column_names)
            staged.append(Staged(effect.label, file, effect.rows.num_rows, effect.truncate, columns))
            failpoint("before-batch-staged")
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(self, epoch: int, start: int, end: int, pieces: Sequence[StagedPiece]) -> bool:
        """See :meth:`.base.Sink.commit`."""
        failpoint("before-batch-commit")

        def decide(contents: Contents) -> Decided | None:
            if not self._is_next(contents, start, end, pieces):
                return None
            tables = self._unit(epoch, contents, pieces)
            failpoint("in-batch-commit")
            return tables, changes.unit_applied(contents, end, time.time())

        committed = self._commit(epoch, f"unit ({format_lsn(start)}, {format_lsn(end)}]", decide)
        for piece in pieces:
            for staged in piece.tables:
                if staged.relation is not None:
                    self._home.remove(staged.relation)
        failpoint("after-batch-commit")
        return committed

    def _commit(self, epoch: int, title: str, decide: Callable[[Contents], Decided | None]) -> bool:
        """Append an entry that decides what is done to tables, and do it; what was staged for it goes then.

        :param decide: as for :meth:`.record.LakeRecord._append`.
        :returns: whether anything was to be committed.
        """
        staged: list[str] = []

        def commit(contents: Contents) -> Commit | None:
            decided = decide(contents)
            if decided is None:
                return None
            works, then = decided
            if not works:
                return Commit(then)
            staged.extend(file for work in works for part in work.parts for file in part.files)
            return Commit(work=to_json(works), then=then + made(work.label for work in works if work.create))

        committed = self._append(epoch, title, commit) is not None
        for file in staged:
            self._home.remove(file)
        return committed

    def _unit(self, epoch: int, contents: Contents, pieces: Sequence[StagedPiece]) -> list[TableWork]:
        """What a unit does to each table.

        :raises MissingValues: when values are nowhere.
        :raises StagingLost: when files are gone.
        """
        targets = changes.targets_of(contents)
        tables: dict[str, list[Staged]] = {}
        for piece in sorted(pieces, key=lambda p: p.index):
            for staged in piece.tables:
                self._check_staged(staged)
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
                    works.append(TableWork(label, "append", (Part(files),), create=create))
                continue
            last = max((n for n, staged in enumerate(layers) if staged.truncate), default=0)
            emptied = layers[last].truncate
            layers = [staged for staged in layers[last:] if staged.relation is not None]
            parts = tuple(Part((staged.relation,)) for staged in layers if staged.relation is not None)
            if any(MISSING in staged.columns for staged in layers):
                file, unknown = self._net(epoch, targets[label], parts, emptied)
                parts = (Part((file,)),)
                if unknown:
                    missing[label] = unknown
            works.append(TableWork(label, "merge", parts, emptied=emptied, create=create))
        if missing:
            raise MissingValues(missing)
        return works

    def _net(
        self, epoch: int, target: Target, parts: Sequence[Part], emptied: bool
    ) -> tuple[str, frozenset[tuple[str, ...]]]:
        """Write the net effect of pieces with the values that were not sent.

        :returns: the name of what was written, and the keys of the rows whose values are nowhere.
        """
        table = self._table(target)
        names = [column.name for column in target.table.columns]
        folded = net.folded(table.effects([part.files for part in parts]), table.key, len(names))
        there = None if emptied or not table.exists() else table.read()
        filled = net.filled(folded, there, names, table.key)
        file = f"staging/units/{epoch}/{uuid.uuid4().hex}"
        filled.write.parquet(location(self._home / file))
        unknown = table.spark.read.parquet(location(self._home / file)).where(net.UNKNOWN)
        return file, _key_texts(unknown.select(*(f"c{i}" for i in table.key)).toArrow())

    def _check_staged(self, staged: Staged) -> None:
        found = staging.staged_rows(self._home, staged.relation) if staged.relation is not None else 0
        if found != staged.rows:
            raise StagingLost(
                f"{staged.rows} rows were staged for {staged.label}, {found} are there",
                "Start again: the unit is staged anew.",
            )

    # -- what the record asks -----------------------------------------------------------------------

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: int | None) -> None:
        """See :meth:`.record.LakeRecord._check_target`."""
        require_possible(self.layout, target, self.mode)
        known = recorded is not None and (recorded.schema, recorded.name) == (target.schema, target.name)
        if self.layout.catalog is None and not has_log(self.layout, target):
            return
        table = self._table(target)
        if not table.exists():
            return
        if self.mode == "changelog" and (ours or known) and start is not None:
            self._refuse_older_history(table, start)
        if ours or known:
            return
        if not table.empty():
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} exists and has rows that pipeline {self.pipeline!r}"
                " did not write",
                "Empty or drop the table, or give the pipeline another target schema (`sink.schema`).",
            )
        wanted, found = table_columns(target, self.mode), Present(table.columns(), mapped=True)
        others = [f"{name} {kind}" for name, kind in wanted.items() if found.type_of(name) != kind]
        if others:
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} exists, but lacks columns: {', '.join(others)}",
                "Drop the table, so that it is created as it has to be, or give it these columns.",
            )

    def _refuse_older_history(self, table: DeltaTable, point: int) -> None:
        """Events are in the order of their LSNs: those of a log that ended later would come after all new ones."""
        found = table.read().selectExpr("max(_commit_lsn)").first()
        last = found[0] if found is not None else None
        name = f"{table.target.schema}.{table.target.name}"
        if last is not None and last > point:
            raise GateClosed(
                f"the changelog {name} has events up to {format_lsn(last)}, but the source's log is at"
                f" {format_lsn(point)}: they are of a history that the source has left, and new ones would come before",
                f"Rename or empty {name}, then run `airflow-cdc resnapshot --all` again.",
            )

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """See :meth:`.record.LakeRecord._described`: tables are made, unless they are there, with their first rows."""
        return unmade(target.table.label for target in targets)

    def _fit(self, contents: Contents, targets: Sequence[Target]) -> Mapping[str, Any] | None:
        """See :meth:`.record.LakeRecord._fit`: a mirror gets them with its rows."""
        recorded = changes.targets_of(contents)
        works = []
        for target in targets if self.mode == "changelog" else ():
            before = recorded.get(target.table.label)
            if before is not None and (found := self._altered(before, target)).alterations:
                works.append(TableWork(target.table.label, "alter", alterations=found.alterations, target=target))
        return to_json(works) if works else None

    def _altered(self, before: Target, after: Target) -> Plan:
        """How a changelog, whose history stays, gets the columns that its source has now."""
        if before.table.to_dict() == after.table.to_dict() or not self._table(before).exists():
            return Plan((), {})
        return plan(before, after, self._present(before), self.mode, rows_stay=False)

    def _present(self, target: Target) -> Present:
        table = self._table(target)
        mapped = table.properties().get("delta.columnMapping.mode", "none") != "none"
        return Present(table.columns(), mapped, self.layout.partitions(target))

    def _carry_out(self, contents: Contents, step: Step) -> None:
        """See :meth:`.record.LakeRecord._carry_out`."""
        works = of_step(contents, step.work)
        application = f"{self.pipeline}/{self.identity()['store']}"

        def is_open() -> bool:
            head = self._log.head()
            return head is not None and changes.step_of(head.contents) == step

        def carry_out(work: tuple[Target, TableWork]) -> None:
            target, what = work
            failpoint("before-table-written")
            try:
                insistently(lambda: self._table(target).write(what, application, step.number, is_open))
            except SPARK_ERRORS as e:
                if not is_open():
                    return  # another process of the run has done it, and removed what was staged
                said = f"the target table {target.schema}.{target.name} could not be written: {first_line(e)}"
                if not stands_in_the_way(e):
                    raise StreamFailed(said, "Start again: what has been decided is done first.") from e
                if self._is_gone(target) and not what.create:
                    # With the step behind, the next start finds it missing, and says what helps.
                    log.warning("the target table %s.%s is gone; its rows are left out", target.schema, target.name)
                    return
                raise TargetConflict(
                    said,
                    "What has been decided is done when the pipeline starts again. Remove what stands in the way, such"
                    f" as a constraint. If the table was made by others, drop it, start again, and run `airflow-cdc"
                    f" resnapshot --table {what.label}`.",
                ) from e
            failpoint("after-table-written")

        if len(works) == 1:
            carry_out(works[0])
            return
        with ThreadPoolExecutor(_TABLES_AT_ONCE) as pool:
            list(pool.map(carry_out, works))

    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.record.LakeRecord._missing`: a table is made when its first rows come."""
        contents: Contents = {} if head is None else head.contents
        begun = [target for target in targets if is_made(contents, target.table.label)]
        if self.layout.catalog is None:
            return tuple(target for target in begun if not has_log(self.layout, target))
        return tuple(target for target in begun if not self._table(target).exists())

    def _is_gone(self, target: Target) -> bool:
        """Whether a target table does not exist, without listing its log, which may be long."""
        if self.layout.catalog is None:
            return self.layout.place(target).size("_delta_log") is None
        return not self._table(target).exists()

    def _require_there(self, target: Target) -> None:
        """Refuse to decide anything for a table that was there and is no longer.

        :raises TargetConflict: naming it.
        """
        if self._is_gone(target):
            raise TargetConflict(
                f"the target table {target.schema}.{target.name} no longer exists",
                f"Run `airflow-cdc resnapshot --table {target.table.label}`: it creates and fills it.",
            )

    def is_there(self, target: Target) -> bool:
        """Whether a target table exists."""
        return self._table(target).exists()

    def is_empty(self, target: Target) -> bool:
        """Whether a target table that is there has no rows."""
        return self._table(target).empty()

    # -- reading ------------------------------------------------------------------------------------

    def compared(self, source: Connection, target: Target) -> AbstractContextManager[Sides]:
        """See :meth:`.base.Sink.compared`."""
        return row_sides(source, target, self.mode, self.rows)

    def rows(self, target: Target, keys: Sequence[Key] | None = None) -> Iterator[pa.RecordBatch]:
        """The captured columns of a mirror's rows as texts, of one version of the table; of a changelog the events.

        :param keys: of the rows; ``None`` for all.
        """
        table = self._table(target)
        names = [column.name for column in target.table.columns]
        if self.mode == "changelog":
            names += ["_op", "_commit_lsn", "_seq", "_before", "_unchanged"]
        found = table.read().select(*map(quoted, names))
        if keys is not None and self.mode == "mirror":
            found = found.join(self._keys(table, keys), list(target.table.key), "left_semi").select(*map(quoted, names))
        # By way of files, so that any number of rows passes through.
        table.spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        place = self._home / "reading" / uuid.uuid4().hex
        try:
            found.toDF(*(f"c{i}" for i in range(len(names)))).write.parquet(location(place))
            for file in place.names():
                if file.endswith(".parquet"):
                    with place.reading(file) as opened:
                        for batch in pq.ParquetFile(opened).iter_batches():
                            yield _texts(batch, names)
        finally:
            place.remove()

    def _keys(self, table: DeltaTable, keys: Sequence[Key]) -> Any:
        columns = zip(*keys, strict=True)
        typed = {
            column.name: to_typed(
                pa.array(texts, TEXT), arrow_type(column), f"{table.target.table.label}.{column.name}"
            )
            for column, texts in zip(table.target.table.key_columns, columns, strict=True)
        }
        return table.spark.createDataFrame(pa.table(typed))

    def _table(self, target: Target) -> DeltaTable:
        return DeltaTable(session(dict(self.conf)), self.layout, target, self.mode, self._home)


def _texts(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """A batch of the table's values as Postgres writes them."""
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


def _key_texts(found: pa.Table) -> frozenset[tuple[str, ...]]:
    columns = [to_texts(column.combine_chunks()).to_pylist() for column in found.columns]
    return frozenset(zip(*columns, strict=True))
