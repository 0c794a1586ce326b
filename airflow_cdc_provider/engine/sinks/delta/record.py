"""The record of a Delta sink: keeps its target tables, and applies the log's entries to them."""

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
    examining_tables,
    first_line,
    is_one_of,
    is_refused_by_table,
    retry_on_conflict,
    session,
)
from airflow_cdc_provider.engine.sinks.delta.table_definition import Plan, Present, plan
from airflow_cdc_provider.engine.sinks.delta.table_layout import Layout, location, require_apart, require_possible
from airflow_cdc_provider.engine.sinks.delta.table_work import TableWork, is_made, made, of_step, to_json, unmade
from airflow_cdc_provider.engine.sinks.delta.view_record import moved, views_of
from airflow_cdc_provider.engine.sinks.lake.log import Head
from airflow_cdc_provider.engine.sinks.lake.record import LakeRecord
from airflow_cdc_provider.engine.sinks.record_log import record_contents
from airflow_cdc_provider.engine.sinks.record_log.record import Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents, Step
from airflow_cdc_provider.engine.views.settings import ViewSettings

log = logging.getLogger(__name__)

Decided = tuple[Sequence[TableWork], Change]
"""The work on tables, and the change of the record when that has been done."""

_TABLES_AT_ONCE = 4


@dataclass(frozen=True)
class DeltaRecord(LakeRecord):
    """The commit record of a pipeline with Delta tables; for its first fields, see :class:`.LakeRecord`.

    :param conf: configuration for Spark, if no session is running.
    :param views: the views of the pipeline file.
    """

    layout: Layout
    conf: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    views: tuple[ViewSettings, ...] = ()

    def _commit(self, epoch: int, title: str, decide: Callable[[Contents], Decided | None]) -> bool:
        """Append an entry that decides the work on tables, and do the work; then remove the staged files.

        :param decide: as for :meth:`.record.LakeRecord._append`.
        :returns: whether there was anything to commit.
        """
        staged: list[str] = []

        def commit(contents: Contents) -> Commit | None:
            with examining_tables():
                decided = decide(contents)
            if decided is None:
                return None
            works, then = decided
            if not works:
                return Commit(then)
            staged.extend(file for work in works for part in work.parts for file in part.files)
            then += made(work.label for work in works if work.create) + moved(contents, [work.label for work in works])
            return Commit(work=to_json(works), then=then)

        committed = self._append(epoch, title, commit) is not None
        for file in staged:
            self._home.remove(file)
        return committed

    @examining_tables()
    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        require_possible(self.layout, target, self.mode)
        known = recorded is not None and (recorded.schema, recorded.name) == (target.schema, target.name)
        if not (ours or known):
            self.require_usable(target)
        elif self.mode == "changelog" and start is not None and (table := self._found(target)) is not None:
            self._refuse_older_history(table, start)

    @examining_tables()
    def require_usable(self, target: Target) -> None:
        """Refuse an existing table that has rows, or cannot have the pipeline's rows unchanged.

        :raises ForeignTable: naming the reasons.
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
                "Drop the table, so that it is created correctly, or alter it accordingly.",
            )

    def _known_as(self, schema: str, name: str) -> Hashable:
        return self.layout.known_as(schema, name)

    def _has(self, contents: Contents, target: Target) -> bool:
        return self._known_as(target.schema, target.name) in self._names(contents)

    def _names(self, contents: Contents) -> set[Hashable]:
        """Return what identifies the tables and views of a record."""
        tables = [(target.schema, target.name) for target in record_contents.targets_of(contents).values()]
        views = [(view.view.schema, view.view.name) for view in views_of(contents)]
        return {self._known_as(*name) for name in (*tables, *views)}

    def _require_apart(self, targets: Sequence[Target]) -> None:
        require_apart(self.layout, targets, self.views)

    @property
    def application(self) -> str:
        """Return the name under which tables record the numbers of commits."""
        return f"{self.pipeline}/{self.identity()['store']}"

    def _refuse_older_history(self, table: DeltaTable, point: LogPosition) -> None:
        """Refuse a changelog with events after a point; new events would sort before events of an
        abandoned timeline.
        """
        found = table.read().selectExpr("max(_commit_lsn)").first()
        last = found[0] if found is not None else None
        name = f"{table.target.schema}.{table.target.name}"
        if last is not None and last > point:
            raise GateClosed(
                f"the changelog {name} has events up to {format_lsn(last)}, but the source's log is at"
                f" {format_lsn(point)}: they belong to a timeline that the source has abandoned, so new events would"
                " sort before them",
                f"Rename or empty {name}, then run `airflow-cdc resnapshot --all` again.",
            )

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        """Mark tables to be created with their first rows, unless they exist."""
        return unmade(target.table.label for target in targets)

    @examining_tables()
    def _fit(self, contents: Contents, targets: Sequence[Target]) -> Mapping[str, Any] | None:
        """Return the alterations of changelogs; a mirror's table is altered with its rows."""
        recorded = record_contents.targets_of(contents)
        works = []
        for target in targets if self.mode == "changelog" else ():
            before = recorded.get(target.table.label)
            if before is not None and (found := self._altered(before, target)).alterations:
                works.append(TableWork(target.table.label, "alter", alterations=found.alterations, target=target))
        return to_json(works) if works else None

    def _altered(self, before: Target, after: Target) -> Plan:
        """Return the alterations that give a changelog, whose history stays, the columns of its source."""
        if before.table.to_dict() == after.table.to_dict() or not self._table(before).exists():
            return Plan((), {})
        return plan(before, after, self._present(before), self.mode, rows_stay=False)

    def _present(self, target: Target) -> Present:
        table = self._table(target)
        mapped = table.properties().get("delta.columnMapping.mode", "none") != "none"
        return Present(table.columns(), mapped, self.layout.partitions(target))

    def _carry_out(self, contents: Contents, step: Step) -> None:
        works = of_step(contents, step.work)
        application = self.application

        def is_open() -> bool:
            head = self._log.head()
            return head is not None and record_contents.step_of(head.contents) == step

        def carry_out(work: tuple[Target, TableWork]) -> None:
            target, what = work
            begun = BEGUN if what.create else ()

            def clear() -> None:
                # A process may have died between creating the log directory and its first entry; then Delta cannot
                # create the table.
                if begun and self.layout.catalog is None and not has_log(self.layout, target) and is_open():
                    self.layout.place(target).remove(LOG)

            failpoint("before-table-written")
            try:
                retry_on_conflict(
                    lambda: self._table(target).write(what, application, step.number, is_open),
                    *begun,
                    at_last=clear,
                )
            except SPARK_ERRORS as e:
                if not is_open():
                    return  # another process of the run has done it, and removed the staged files
                said = f"the target table {target.schema}.{target.name} could not be written: {first_line(e)}"
                if is_one_of(begun, e):
                    raise StreamFailed(said, self._how_to_end(target)) from e
                if not is_refused_by_table(e):
                    raise StreamFailed(said, "Start again: the recorded step is completed first.") from e
                if self._is_gone(target) and not what.create:
                    # The step is then complete; the next start finds the table missing, and names the repair.
                    log.warning(
                        "the target table %s.%s no longer exists; its rows are skipped", target.schema, target.name
                    )
                    return
                raise TargetConflict(
                    said,
                    "Remove the obstacle, such as a constraint, and start again: the recorded step is completed first."
                    " If others created the table, drop it, start again, and run `airflow-cdc"
                    f" resnapshot --table {what.label}`.",
                ) from e
            failpoint("after-table-written")

        if len(works) == 1:
            carry_out(works[0])
            return
        with ThreadPoolExecutor(_TABLES_AT_ONCE) as pool:
            list(pool.map(carry_out, works))

    def _how_to_end(self, target: Target) -> str:
        """Return the remedy if the creation of a table does not complete."""
        again = "Start again: the recorded step is completed first. If the error recurs,"
        if self.layout.catalog is None:
            return f"{again} remove the files that others have left in {location(self.layout.place(target))}."
        name = self.layout.sql_name(target)
        return (
            f"{again} a run died before the catalog knew the table. If the directory in Spark's error has a {LOG} with"
            f" a .json file, run `CREATE TABLE {name} USING delta LOCATION '…'` with it; otherwise remove it."
        )

    @examining_tables()
    def _missing(self, head: Head | None, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return missing targets among those created before; a table is created with its first rows."""
        contents: Contents = {} if head is None else head.contents
        begun = [target for target in targets if is_made(contents, target.table.label)]
        if self.layout.catalog is None:
            return tuple(target for target in begun if not has_log(self.layout, target))
        return tuple(target for target in begun if not self._table(target).exists())

    @examining_tables()
    def _is_gone(self, target: Target) -> bool:
        """Return whether a target table does not exist, without listing its log, which may be long."""
        if self.layout.catalog is None:
            return self.layout.place(target).size(LOG) is None
        return not self._table(target).exists()

    def _require_there(self, target: Target) -> None:
        """Require that a table created before still exists, before a step is decided.

        :raises TargetConflict: naming the table.
        """
        if self._is_gone(target):
            raise TargetConflict(
                f"the target table {target.schema}.{target.name} no longer exists",
                f"Run `airflow-cdc resnapshot --table {target.table.label}` to recreate and fill it.",
            )

    @examining_tables()
    def is_there(self, target: Target) -> bool:
        """Return whether a target table exists."""
        return self._table(target).exists()

    def _found(self, target: Target) -> DeltaTable | None:
        """Return a target table if it exists; Spark is not needed for a path table."""
        if self.layout.catalog is None:
            return self._table(target) if has_log(self.layout, target) else None
        table = self._table(target)
        return table if table.exists() else None

    def _table(self, target: Target) -> DeltaTable:
        return DeltaTable(session(dict(self.conf)), self.layout, target, self.mode, self._home)
