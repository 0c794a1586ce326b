"""Stream units of the MySQL sink: staged by executors, applied by the driver in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.effect import MISSING, Effect
from airflow_cdc_provider.engine.core.errors import Fenced, GateClosed, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.sinks.mysql.record import MysqlRecord
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.staging_tables import TableStatements
from airflow_cdc_provider.engine.sinks.staged import MissingValues, Staged, StagedPiece

_FRAGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class MysqlUnits(MysqlRecord):
    """How units of the stream come into the target tables, and what is too large to pass through Spark."""

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`: rows of a table, in fragments that a packet holds."""
        with self._transaction(epoch, "share") as (opened, _):
            view = memoryview(data)
            for number, at in enumerate(range(0, len(view), _FRAGMENT_BYTES)):
                opened.run(
                    "INSERT INTO airflow_cdc.deposits (pipeline, name, number, fragment) VALUES (%s, %s, %s, %s)",
                    [self.pipeline, name, number, bytes(view[at : at + _FRAGMENT_BYTES])],
                )

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.contract.Sink.fetch`."""
        data = bytearray()
        with self._transaction(epoch, "share") as (opened, _):
            query = "SELECT fragment FROM airflow_cdc.deposits WHERE pipeline = %s AND name = %s AND number = %s"
            number = 0
            while found := opened.rows(query, [self.pipeline, name, number]):
                data += found[0][0]
                number += 1
        if len(data) != size:
            raise StagingLost(
                f"a piece of the log of {size} bytes was deposited in the sink, {len(data)} are there",
                "Start again: the piece is read anew.",
            )
        return data

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.contract.Sink.discard`."""
        with contextlib.suppress(Fenced), self._transaction(epoch, "share") as (opened, _):
            delete = "DELETE FROM airflow_cdc.deposits WHERE pipeline = %s"
            if names is None:
                opened.run(delete, [self.pipeline])
            for name in names or ():
                opened.run(f"{delete} AND name = %s", [self.pipeline, name])

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.contract.Sink.stage`.

        The tables are created before the transaction in which they are filled. If the run has been overtaken in
        between, they are left empty, and swept.
        """
        if not effects:
            return ()
        staged, filled = [], []
        with self._transaction(epoch, "share") as (opened, _):
            targets = self._targets(opened)
            for number, effect in enumerate(effects):
                relation, rows = None, effect.rows
                if rows.num_rows:
                    relation = f"{self._staging_prefix}{attempt}_{number}"
                    statements = TableStatements(opened, targets[effect.label], self.mode)
                    rows = statements.staged_rows(rows)
                    with row_of(effect.label):
                        statements.create_staging(relation, rows.column_names)
                    filled.append((statements, relation, rows))
                staged.append(Staged(effect.label, relation, rows.num_rows, effect.truncate, tuple(rows.column_names)))
            opened.rollback()
            self._begin(opened, epoch, "share")
            for statements, relation, rows in filled:
                statements.fill_staging(relation, rows)
            failpoint("before-batch-staged")
            opened.commit()
        failpoint("after-batch-staged")
        return tuple(staged)

    def commit(
        self,
        epoch: int,
        start: int,
        end: int,
        pieces: Sequence[StagedPiece],
        noted: Mapping[str, Any] | None = None,
    ) -> bool:
        """See :meth:`.contract.Sink.commit`."""
        failpoint("before-batch-commit")
        with self._transaction(epoch, "update") as (opened, applied):
            skip = applied >= end
            if not skip:
                if start != applied:
                    raise GateClosed(
                        f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {self.pipeline} does not begin"
                        f" at the applied LSN {format_lsn(applied)}: transactions would be lost or repeated",
                        "Start the pipeline again; it goes on from the applied LSN. If the sink was restored from a"
                        " backup, run `airflow-cdc resnapshot --all`.",
                    )
                self._check_filters(opened, pieces)
                self._apply(opened, pieces)
                opened.run(
                    "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, updated_at = NOW(6) WHERE pipeline = %s",
                    [end, self.pipeline],
                )
                if noted:
                    self._note(opened, noted)
                # A re-read of keys is a filter and nothing else; passed, it is forgotten.
                opened.run(
                    "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND keys_read IS NOT NULL AND high_lsn <= %s",
                    [self.pipeline, end],
                )
            failpoint("in-batch-commit")
            opened.commit()
            failpoint("before-staging-dropped")
            # Not before: to drop a table commits. What a crash leaves here is swept.
            for piece in pieces:
                for staged in piece.tables:
                    if staged.relation is not None:
                        opened.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', staged.relation)}")
        failpoint("after-batch-commit")
        return not skip

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """See :meth:`.contract.Rehearsing.rehearse`."""
        with self._transaction(epoch, "update") as (opened, _):
            self._apply(opened, pieces)
            opened.rollback()

    def _apply(self, opened: Session, pieces: Sequence[StagedPiece]) -> None:
        targets = self._targets(opened)
        missing: dict[str, set[tuple[str, ...]]] = {}
        for piece in sorted(pieces, key=lambda p: p.index):
            for staged in piece.tables:
                statements = TableStatements(opened, targets[staged.label], self.mode)
                if staged.relation is not None:
                    self._check_staged(statements, staged)
                if self.mode == "changelog":
                    if staged.relation is not None:
                        with row_of(staged.label):
                            statements.apply_changelog(staged)
                    continue
                if staged.truncate:
                    # TRUNCATE would commit what has been applied so far, without the rest.
                    statements.delete(None)
                if staged.relation is None:
                    continue
                with row_of(staged.label):
                    if MISSING in staged.columns:
                        missing.setdefault(staged.label, set()).update(statements.fill_missing(staged.relation))
                    statements.apply_mirror(staged)
        if any(missing.values()):
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items() if keys})

    def _check_filters(self, opened: Session, pieces: Sequence[StagedPiece]) -> None:
        """Rows that were read since the unit was staged hold changes that it would take back."""
        query = "SELECT source_table FROM airflow_cdc.chunks WHERE pipeline = %s AND high_lsn > %s ORDER BY 1 LIMIT 1"
        for high in {piece.high for piece in pieces}:
            for (label,) in opened.rows(query, [self.pipeline, high]):
                raise StagingLost(
                    f"rows of {label} were read again after the unit had been staged",
                    "Start again: the unit is staged anew, without what has been read.",
                )

    @staticmethod
    def _check_staged(statements: TableStatements, staged: Staged) -> None:
        """Count before anything is applied."""
        assert staged.relation is not None
        count = statements.count(staged.relation)
        if count != staged.rows:
            raise StagingLost(
                f"{staged.rows} rows were staged for {staged.label}, {count} are there",
                "Start again: the unit is staged anew.",
            )

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.Sink.sweep`."""
        with contextlib.suppress(Fenced), self._alone(epoch) as opened:
            self._drop_tables(opened)

    def _drop_tables(self, opened: Session) -> None:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
        for (name,) in opened.rows(query):
            if str(name).startswith((self._staging_prefix, self._aside_prefix)):
                opened.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', str(name))}")

    def drop(self) -> None:
        """See :meth:`.contract.Sink.drop`."""
        with self._alone() as opened:
            if not opened.exists("airflow_cdc", "pipelines"):
                return
            opened.begin()
            for table in ("chunks", "tables", "pending", "deposits", "pipelines"):
                opened.run(f"DELETE FROM airflow_cdc.{table} WHERE pipeline = %s", [self.pipeline])
            opened.commit()
            self._drop_tables(opened)

    @property
    def _staging_prefix(self) -> str:
        return f"stage_{self._mark}_"

    @property
    def _aside_prefix(self) -> str:
        return f"aside_{self._mark}_"
