"""Units of the stream in Postgres: staged by tasks, and committed with the record in one transaction."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import COUNT, MISSING, Effect
from airflow_cdc_provider.engine.core.errors import Fenced, GateClosed, StagingLost
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.lsn import format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches
from airflow_cdc_provider.engine.sinks.postgres.key_equality import TargetKey
from airflow_cdc_provider.engine.sinks.postgres.large_pieces import read_deposit, write_deposit
from airflow_cdc_provider.engine.sinks.postgres.record import PostgresRecord
from airflow_cdc_provider.engine.sinks.postgres.refused_values import refusals
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import gather
from airflow_cdc_provider.engine.sinks.postgres.staged_rows import rows_to_stage
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import TableStatements
from airflow_cdc_provider.engine.sinks.staged import MissingValues, Share, Staged, StagedPiece

T = TypeVar("T")
_NAMED = 100  # tables by a statement at most


@dataclass(frozen=True)
class PostgresUnits(PostgresRecord):
    """See :class:`.contract.Sink`: units."""

    def deposit(self, epoch: int, name: str, data: bytes | bytearray) -> None:
        """See :meth:`.contract.Sink.deposit`."""
        with self._transaction() as connection:
            self._fence(connection, epoch, "FOR SHARE")
            rows(connection, "SET LOCAL synchronous_commit = off")
            write_deposit(connection, self._deposit(name), data)

    def fetch(self, epoch: int, name: str, size: int) -> bytearray:
        """See :meth:`.contract.Sink.fetch`."""
        with self._transaction() as connection:
            self._fence(connection, epoch, "FOR KEY SHARE")
            return read_deposit(connection, self._deposit(name), size)

    def discard(self, epoch: int, names: Collection[str] | None = None) -> None:
        """See :meth:`.contract.CommitRecord.discard`."""
        with contextlib.suppress(Fenced), self._transaction() as connection:
            self._fence(connection, epoch, "FOR SHARE")
            if names is None:
                self._drop_unlogged(connection, self._deposit_prefix)
            for name in names or ():
                rows(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(self._deposit(name)))

    def _deposit(self, name: str) -> sql.Composable:
        return sql.Identifier("airflow_cdc", f"{self._deposit_prefix}{name}")

    def stage(self, epoch: int, attempt: str, effects: Sequence[Effect]) -> tuple[Staged, ...]:
        """See :meth:`.contract.Sink.stage`."""
        if not effects:
            return ()
        staged = []
        with self._transaction() as connection:
            self._fence(connection, epoch, "FOR KEY SHARE")
            rows(connection, "SET LOCAL synchronous_commit = off")
            targets = self._targets(connection, {effect.label for effect in effects})
            all_rows = [rows_to_stage(effect) for effect in effects]
            shared = f"{self._staging_prefix}{attempt}_few"
            shares: dict[int, Share] = {}
            if self.mode == "mirror":
                shares = gather(connection, shared, targets, [effect.label for effect in effects], all_rows)
            for number, (effect, staged_rows) in enumerate(zip(effects, all_rows, strict=True)):
                relation = None
                if number in shares:
                    relation = shared
                elif staged_rows.num_rows:
                    relation = f"{self._staging_prefix}{attempt}_{number}"
                    target = targets[effect.label]
                    statements = TableStatements(connection, target)
                    if COUNT in staged_rows.column_names:
                        statements.create_counted_staging(relation, staged_rows.column_names)
                    elif self.mode == "mirror":
                        statements.create_mirror_staging(relation, staged_rows.column_names)
                    else:
                        statements.create_changelog_staging(relation, staged_rows.column_names)
                    with refusals(target, {f"c{i}": c.name for i, c in enumerate(target.table.columns)}):
                        copy_batches(
                            connection,
                            sql.Identifier("airflow_cdc", relation),
                            staged_rows.column_names,
                            iter(staged_rows.to_batches()),
                        )
                staged.append(
                    Staged(
                        effect.label,
                        relation,
                        effect.rows.num_rows,
                        effect.truncate,
                        tuple(staged_rows.column_names),
                        shares.get(number),
                    )
                )
            failpoint("before-batch-staged")
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
        return self._commit(epoch, start, end, iter(sorted(pieces, key=lambda piece: piece.index)), noted)

    def commit_as_staged(self, epoch: int, start: int, end: int, pieces: Iterator[StagedPiece]) -> bool:
        """See :meth:`.contract.Eager.commit_as_staged`."""
        return self._commit(epoch, start, end, pieces, None)

    def rehearse(self, epoch: int, pieces: Sequence[StagedPiece]) -> None:
        """See :meth:`.contract.Rehearsing.rehearse`."""
        with self._transaction(rehearsal=True) as connection:
            self._fence(connection, epoch, "FOR NO KEY UPDATE")
            self._apply(connection, iter(sorted(pieces, key=lambda piece: piece.index)))
            # What is checked at the end of a transaction would not be, as it is rolled back.
            rows(connection, "SET CONSTRAINTS ALL IMMEDIATE")

    def _commit(
        self, epoch: int, start: int, end: int, pieces: Iterator[StagedPiece], noted: Mapping[str, Any] | None
    ) -> bool:
        failpoint("before-batch-commit")
        staged: list[Staged] = []
        with self._transaction() as connection:
            applied = parse_lsn(self._fence(connection, epoch, "FOR NO KEY UPDATE"))
            skip = applied >= end
            if not skip:
                if start != applied:
                    raise GateClosed(
                        f"the unit ({format_lsn(start)}, {format_lsn(end)}] of pipeline {self.pipeline} does not begin"
                        f" at the applied LSN {format_lsn(applied)}: transactions would be lost or repeated",
                        "Start the pipeline again; it goes on from the applied LSN. If the sink was restored from a"
                        " backup, run `airflow-cdc resnapshot --all`.",
                    )
                staged = self._apply(connection, pieces)
                rows(
                    connection,
                    "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, updated_at = clock_timestamp()"
                    " WHERE pipeline = %s",
                    [format_lsn(end), self.pipeline],
                )
                if noted:
                    self._note(connection, noted)
                # A re-read of keys is a filter and nothing else; passed, it is forgotten.
                rows(
                    connection,
                    "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND keys IS NOT NULL AND high_lsn <= %s",
                    [self.pipeline, format_lsn(end)],
                )
            staged += (each for piece in pieces for each in piece.tables)  # of a unit that is skipped
            relations = list(dict.fromkeys(each.relation for each in staged if each.relation is not None))
            for some in _portions(relations):
                names = sql.SQL(", ").join(sql.Identifier("airflow_cdc", relation) for relation in some)
                rows(connection, sql.SQL("DROP TABLE {}").format(names))
            failpoint("in-batch-commit")
        failpoint("after-batch-commit")
        return not skip

    def _apply(self, connection: Connection, pieces: Iterator[StagedPiece]) -> list[Staged]:
        """Apply pieces; return what had been staged for them."""
        targets: dict[str, Target] = {}
        missing: dict[str, set[tuple[str, ...]]] = {}
        statements_of: dict[str, TableStatements] = {}
        all_staged: list[Staged] = []
        for piece in pieces:
            self._check_filters(connection, piece.high)
            self._check_staged(connection, piece.tables)
            all_staged += piece.tables
            touched = {staged.label for staged in piece.tables} - set(statements_of)
            targets |= self._targets(connection, touched) if touched else {}
            keys = TargetKey.of_all(connection, [targets[label] for label in touched if self.mode == "mirror"])
            statements_of |= {label: TableStatements(connection, targets[label], keys.get(label)) for label in touched}
            for staged in piece.tables:
                target, statements = targets[staged.label], statements_of[staged.label]
                if self.mode == "changelog":
                    with refusals(target):
                        statements.apply_changelog(staged)
                    continue
                if staged.truncate:
                    # TRUNCATE would show an empty table to readers that hold an older snapshot.
                    statements.delete(None)
                if staged.relation is None:
                    continue
                if COUNT in staged.columns:
                    with refusals(target):
                        statements.apply_counted(staged)
                    continue
                if MISSING in staged.columns:
                    missing.setdefault(staged.label, set()).update(statements.fill_missing(staged))
                with refusals(target, find=partial(statements.refused_column, staged)):
                    statements.apply_mirror(staged)
            failpoint("after-piece-applied")
        if any(missing.values()):
            raise MissingValues({label: frozenset(keys) for label, keys in missing.items() if keys})
        return all_staged

    def _check_filters(self, connection: Connection, high: int) -> None:
        """Rows that were read since a piece was staged hold changes that it would take back."""
        query = "SELECT source_table FROM airflow_cdc.chunks WHERE pipeline = %s AND high_lsn > %s ORDER BY 1 LIMIT 1"
        for (label,) in rows(connection, query, [self.pipeline, format_lsn(high)]):
            raise StagingLost(
                f"rows of {label} were read again after the unit had been staged",
                "Start again: the unit is staged anew, without what has been read.",
            )

    def _check_staged(self, connection: Connection, piece: Sequence[Staged]) -> None:
        """Unlogged tables are empty after a crash of the target: count before a piece is applied."""
        expected: dict[str, tuple[int, str]] = {}
        for staged in piece:
            if staged.relation is not None and staged.share is None:
                expected[staged.relation] = (staged.rows, staged.label)
            elif staged.relation is not None:  # which has a row for each table
                tables = 1 + expected.get(staged.relation, (0, ""))[0]
                expected[staged.relation] = (tables, f"{tables} tables")
        for some in _portions(list(expected.items())):
            names = [sql.Identifier("airflow_cdc", relation).as_string(connection) for relation, _ in some]
            query = (
                "SELECT to_regclass(name) IS NOT NULL FROM unnest(%s::text[]) WITH ORDINALITY AS u (name, n) ORDER BY n"
            )
            exists = [found for (found,) in rows(connection, query, [names])]
            counts = dict.fromkeys(range(len(some)), 0)
            there = [f"SELECT {n}, count(*) FROM {name}" for n, name in enumerate(names) if exists[n]]
            counts |= dict(rows(connection, " UNION ALL ".join(there))) if there else {}
            for n, (_, (count, what)) in enumerate(some):
                if counts[n] != count:
                    raise StagingLost(
                        f"{count} rows were staged for {what}, {counts[n]} are there",
                        "Start again: the unit is staged anew. The target server has probably crashed in between.",
                    )

    def sweep(self, epoch: int) -> None:
        """See :meth:`.contract.CommitRecord.sweep`."""
        with contextlib.suppress(Fenced), self._transaction() as connection:
            self._fence(connection, epoch, "FOR SHARE")
            self._drop_unlogged(connection, self._staging_prefix)

    @staticmethod
    def _drop_unlogged(connection: Connection, prefix: str) -> None:
        found = rows(
            connection,
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = 'airflow_cdc' AND c.relkind = 'r' AND starts_with(c.relname, %s)",
            [prefix],
        )
        for (name,) in found:
            rows(connection, sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier("airflow_cdc", name)))

    def drop(self) -> None:
        """See :meth:`.contract.CommitRecord.drop`."""
        with self._transaction() as connection:
            if scalar(connection, "SELECT to_regclass('airflow_cdc.pipelines')") is None:
                return
            for prefix in (self._staging_prefix, self._deposit_prefix):
                self._drop_unlogged(connection, prefix)
            for table in ("chunks", "tables", "pipelines"):
                rows(
                    connection,
                    sql.SQL("DELETE FROM {} WHERE pipeline = %s").format(sql.Identifier("airflow_cdc", table)),
                    [self.pipeline],
                )

    @property
    def _staging_prefix(self) -> str:
        return f"stage_{self._mark}_"

    @property
    def _deposit_prefix(self) -> str:
        return f"piece_{self._mark}_"

    @property
    def _mark(self) -> str:
        """Of a fixed length, so that no pipeline's prefix begins another's."""
        return hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]


def _portions(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many at a time as a statement may well name."""
    return (things[start : start + _NAMED] for start in range(0, len(things), _NAMED))
