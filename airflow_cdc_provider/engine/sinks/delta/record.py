"""What a Delta sink keeps beside its rows: its target tables, and the log's entries, which it carries out at them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from airflow_cdc_provider.engine.core.errors import ForeignTable, GateClosed, StreamFailed, TargetConflict
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.sinks.delta.delta_table import LOG, DeltaTable, has_log
from airflow_cdc_provider.engine.sinks.delta.obstacles import obstacles
from airflow_cdc_provider.engine.sinks.delta.spark_errors import (
    BEGUN,
    SPARK_ERRORS,
    first_line,
    insistently,
    is_one_of,
    looking,
    session,
    stands_in_the_way,
)
from airflow_cdc_provider.engine.sinks.delta.table_definition import Plan, Present, plan
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, location, require_apart, require_possible
from airflow_cdc_provider.engine.sinks.delta.table_work import TableWork, is_made, made, of_step, to_json, unmade
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import LakeRecord
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step

log = logging.getLogger(__name__)

Decided = tuple[Sequence[TableWork], Change]
"""What is to be done to tables, and what the record says when that has been done."""

_TABLES_AT_ONCE = 4


@dataclass(frozen=True)
class DeltaRecord(LakeRecord):
    """A pipeline's commit record beside Delta tables; see, for its first fields, the record of a lake.

    :param conf: of Spark, where none runs yet.
    """

    layout: Layout
    conf: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def _commit(self, epoch: int, title: str, decide: Callable[[Contents], Decided | None]) -> bool:
        """Append an entry that decides what is done to tables, and do it; what was staged for it goes then.

        :param decide: as for :meth:`.record.LakeRecord._append`.
        :returns: whether anything was to be committed.
        """
        staged: list[str] = []

        def commit(contents: Contents) -> Commit | None:
            with looking():
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

    @looking()
    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        """See :meth:`.record.LakeRecord._check_target`."""
        require_possible(self.layout, target, self.mode)
        known = recorded is not None and (recorded.schema, recorded.name) == (target.schema, target.name)
        if not (ours or known):
            self.require_usable(target)
        elif self.mode == "changelog" and start is not None and (table := self._found(target)) is not None:
            self._refuse_older_history(table, start)

    @looking()
    def require_usable(self, target: Target) -> None:
        """Refuse a table of others that has rows, or would not take the pipeline's or keep them as they are.

        :raises ForeignTable: saying why.
        """
        table = self._found(target)
        if table is None:
            return
        if not table.empty():
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} exists and has rows that pipeline {self.pipeline!r}"
                " did not write",
                "Empty or drop the table, or give the pipeline another target schema (`sink.schema`).",
            )
        found = obstacles(target, self.mode, table.schema(), table.properties())
        if found:
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} exists, but cannot have the rows: {'; '.join(found)}",
                "Drop the table, so that it is created as it has to be, or make it so.",
            )

    def _known_as(self, schema: str, name: str) -> Hashable:
        """See :meth:`.record.LakeRecord._known_as`."""
        return self.layout.known_as(schema, name)

    def _require_apart(self, targets: Sequence[Target]) -> None:
        """See :meth:`.record.LakeRecord._require_apart`."""
        require_apart(self.layout, targets)

    def _refuse_older_history(self, table: DeltaTable, point: LogPosition) -> None:
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

    @looking()
    def _fit(self, contents: Contents, targets: Sequence[Target]) -> Mapping[str, Any] | None:
        """See :meth:`.record.LakeRecord._fit`: a mirror gets them with its rows."""
        recorded = record_contents.targets_of(contents)
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
            return head is not None and record_contents.step_of(head.contents) == step

        def carry_out(work: tuple[Target, TableWork]) -> None:
            target, what = work
            begun = BEGUN if what.create else ()

            def clear() -> None:
                # Of who died between making the log and its first entry: Delta makes no table where it is.
                if begun and self.layout.catalog is None and not has_log(self.layout, target) and is_open():
                    self.layout.place(target).remove(LOG)

            failpoint("before-table-written")
            try:
                insistently(
                    lambda: self._table(target).write(what, application, step.number, is_open),
                    *begun,
                    at_last=clear,
                )
            except SPARK_ERRORS as e:
                if not is_open():
                    return  # another process of the run has done it, and removed what was staged
                said = f"the target table {target.schema}.{target.name} could not be written: {first_line(e)}"
                if is_one_of(begun, e):
                    raise StreamFailed(said, self._how_to_end(target)) from e
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

    def _how_to_end(self, target: Target) -> str:
        """What helps where the making of a table does not come to its end."""
        again = "Start again: what has been decided is done first. If this comes again,"
        if self.layout.catalog is None:
            return f"{again} remove what others have left in {location(self.layout.place(target))}."
        name = self.layout.sql_name(target)
        return (
            f"{again} a run has died before the catalog knew of the table. If the folder that Spark names has a {LOG}"
            f" with a .json, run CREATE TABLE {name} USING delta LOCATION '…' with that folder; otherwise remove it."
        )

    @looking()
    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.record.LakeRecord._missing`: a table is made when its first rows come."""
        contents: Contents = {} if head is None else head.contents
        begun = [target for target in targets if is_made(contents, target.table.label)]
        if self.layout.catalog is None:
            return tuple(target for target in begun if not has_log(self.layout, target))
        return tuple(target for target in begun if not self._table(target).exists())

    @looking()
    def _is_gone(self, target: Target) -> bool:
        """Whether a target table does not exist, without listing its log, which may be long."""
        if self.layout.catalog is None:
            return self.layout.place(target).size(LOG) is None
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

    @looking()
    def is_there(self, target: Target) -> bool:
        """Whether a target table exists."""
        return self._table(target).exists()

    def _found(self, target: Target) -> DeltaTable | None:
        """A target table, if it exists; a path table is looked for without Spark."""
        if self.layout.catalog is None:
            return self._table(target) if has_log(self.layout, target) else None
        table = self._table(target)
        return table if table.exists() else None

    def _table(self, target: Target) -> DeltaTable:
        return DeltaTable(session(dict(self.conf)), self.layout, target, self.mode, self._home)
