"""Target tables of the MySQL sink: determines which belong to the pipeline, must be created, or are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from airflow_cdc_provider.engine.changes.redefinition import redefinition
from airflow_cdc_provider.engine.core.errors import CdcError, ForeignTable, GateClosed
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.mysql import address, session_errors
from airflow_cdc_provider.engine.sinks.mysql.fence import MysqlFence
from airflow_cdc_provider.engine.sinks.mysql.obstacles import find_obstacle
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.table_definition import (
    VIEW_INDEX,
    Differing,
    Mode,
    alteration,
    columns_of,
    comment,
    create_table,
    differing,
    normalized_type,
)


@dataclass(frozen=True)
class MysqlTargets(MysqlFence):
    """The part of a MySQL sink that prepares target tables before rows are written."""

    @contextmanager
    def _created(self, opened: Session, targets: Sequence[Target]) -> Iterator[None]:
        """Create target tables; after an error they are dropped again."""
        made: list[str] = []
        try:
            for target in targets:
                opened.require_database(target.schema)
                name = quoted(target.schema, target.name)
                opened.run(f"DROP TABLE IF EXISTS {name}")  # empty and the pipeline's own: see _lacks
                with session_errors.row_of(target.table.label):
                    opened.run(create_table(target, self.mode, opened.collation, self.pipeline))
                made.append(name)
            yield
        except (CdcError, address.driver().MySQLError):
            with suppress(address.driver().MySQLError):
                opened.rollback()
                for name in made:
                    opened.run(f"DROP TABLE IF EXISTS {name}")
            raise

    def _lacks(self, opened: Session, target: Target) -> bool:
        """Return whether a target table has to be created; an existing one is the pipeline's, or empty and of the right
        form.

        :raises ForeignTable: when it is neither, or belongs to another pipeline.
        """
        wanted = create_table(target, self.mode, opened.collation, self.pipeline)
        label, shown = target.table.label, f"{target.schema}.{target.name}"
        if opened.exists("airflow_cdc", "tables"):
            owners = opened.rows(
                "SELECT DISTINCT pipeline, source_table FROM airflow_cdc.tables"
                " WHERE target_schema = %s AND target_table = %s",
                [target.schema, target.name],
            )
            others = [repr(owner) for owner, _ in owners if owner != self.pipeline]
            if others:
                raise ForeignTable(
                    f"the target table {shown} belongs to pipeline {', '.join(others)}",
                    "Give this pipeline another target database (`sink.schema`). Or, if the other pipeline is not"
                    " needed anymore, run `airflow-cdc drop` with its file, then try again.",
                )
            if (self.pipeline, label) in owners:
                return not opened.exists(target.schema, target.name)
        if not opened.exists(target.schema, target.name):
            return True
        if opened.rows(f"SELECT 1 FROM {quoted(target.schema, target.name)} LIMIT 1"):
            raise ForeignTable(
                f"the target table {shown} exists and has rows that pipeline {self.pipeline!r} did not write",
                "Empty or drop the table, or give the pipeline another target database (`sink.schema`).",
            )
        if not difference(opened, target, self.mode):
            return False
        (said,) = opened.one(
            "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
            [target.schema, target.name],
        )
        if said == comment(self.pipeline):
            return True
        raise ForeignTable(
            f"the target table {shown} exists, but does not have the required form"
            f" ({difference(opened, target, self.mode)})",
            f"Drop the table, so that it is created, or create it with: {' '.join(wanted.split())};"
            f" {correcting_statement(opened, target, self.mode)}".rstrip(),
        )

    def _adopt(self, opened: Session, target: Target, start: LogPosition) -> None:
        """Accept an unrecorded target table as the pipeline's; its rows will be replaced."""
        if self.mode == "changelog":
            self._refuse_older_history(opened, target, start)
        different = difference(opened, target, self.mode)
        if different:
            wanted = create_table(target, self.mode, opened.collation, self.pipeline)
            raise ForeignTable(
                f"the target table {target.schema}.{target.name} is not defined like {target.table.label}"
                f" ({different})",
                f"Drop or rename it, so that it is created, or create it with: {' '.join(wanted.split())}; then run"
                " `airflow-cdc resnapshot --all`.",
            )

    def _refuse_older_history(self, opened: Session, target: Target, point: LogPosition) -> None:
        """Refuse a changelog with events after a point; new events would sort before events of an
        abandoned timeline.
        """
        (last,) = opened.one(f"SELECT MAX(_commit_lsn) FROM {quoted(target.schema, target.name)}")
        if last is not None and (found := LogPosition(int(last))) > point:
            raise GateClosed(
                f"the changelog {target.schema}.{target.name} has events up to {format_lsn(found)}, but the source's"
                f" log is at {format_lsn(point)}: they belong to a timeline that the source has abandoned, so new"
                " events would sort before them",
                f"Rename or empty {target.schema}.{target.name}, then run `airflow-cdc resnapshot --all` again.",
            )

    def _alteration(self, opened: Session, shape: Table, target: Target, rows_stay: bool) -> list[str]:
        """Return the clauses of an ALTER TABLE, see :func:`.table_definition.alteration`."""
        present = [
            str(name)
            for (name,) in opened.rows(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
                [target.schema, target.name],
            )
        ]
        clauses = alteration(shape, target, self.mode, opened.collation, present, rows_stay)
        return [*self._obstructive_indexes(opened, shape, target), *clauses] if clauses else []

    def _obstructive_indexes(self, opened: Session, shape: Table, target: Target) -> list[str]:
        """Return the clauses that drop indexes of views whose columns become too long for an index.

        The views are built again because of such a change, and their indexes too.
        """
        old, new = (columns_of(table, self.mode, opened.collation) for table in (shape, target.table))
        renamed = dict(redefinition(shape, target.table).renamed)
        longer = {
            name
            for name, kind in old.items()
            if new.get(renamed.get(name, name), "").startswith("LONG") and not kind.startswith("LONG")
        }
        found = opened.rows(
            "SELECT index_name, column_name FROM information_schema.statistics"
            " WHERE table_schema = %s AND table_name = %s",
            [target.schema, target.name],
        )
        names = {str(index) for index, column in found if str(column) in longer}
        return [f"DROP INDEX {quoted(name)}" for name in sorted(names) if name.startswith(VIEW_INDEX)]


def correcting_statement(opened: Session, target: Target, mode: Mode) -> str:
    """Return the ALTER TABLE that adds or corrects a table's columns; empty if they are right."""
    clauses = ", ".join(each.clause for each in _differing(opened, target, mode))
    return f"ALTER TABLE {quoted(target.schema, target.name)} {clauses};" if clauses else ""


def _differing(opened: Session, target: Target, mode: Mode) -> list[Differing]:
    found = opened.rows(
        "SELECT column_name, column_type FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
        [target.schema, target.name],
    )
    types = {str(name): normalized_type(str(kind)) for name, kind in found}
    return differing(types, columns_of(target.table, mode, opened.collation))


def difference(opened: Session, target: Target, mode: Mode) -> str:
    """Return how a table differs from its required form; empty if it does not."""
    where = [target.schema, target.name]
    wanted_columns = columns_of(target.table, mode, opened.collation)
    required = [name for name, kind in wanted_columns.items() if kind.endswith(" NOT NULL")]
    if mode == "mirror":
        required = list(wanted_columns)  # the columns that the source has
    obstacle = find_obstacle(opened, target, wanted_columns, required)
    if obstacle:
        return obstacle
    found = opened.rows(
        "SELECT column_name, character_set_name, collation_name FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s",
        where,
    )
    different = _differing(opened, target, mode)
    if different:
        return "; ".join(map(str, different))
    (engine,) = opened.one(
        "SELECT engine FROM information_schema.tables WHERE table_schema = %s AND table_name = %s", where
    )
    if str(engine).lower() != "innodb":
        return f"engine {engine}"
    keys = opened.rows(
        "SELECT column_name FROM information_schema.statistics"
        " WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'",
        where,
    )
    if mode == "mirror" and {str(name) for (name,) in keys} != set(target.table.key):
        return "primary key"
    # Under another collation, two keys of the source may be equal; another character set lacks some characters.
    key = {name.lower() for name in target.table.key} if mode == "mirror" else set()
    wanted = {name.lower() for name in columns_of(target.table, mode, opened.collation)}
    for name, characters, collation in found:
        if str(name).lower() in wanted and characters is not None:
            if characters != "utf8mb4":
                return f"character set {characters} of column {name}"
            if str(name).lower() in key and collation != opened.collation:
                return f"collation {collation} of column {name}"
    return ""
