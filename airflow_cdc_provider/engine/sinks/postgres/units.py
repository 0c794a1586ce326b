"""Writes units of the stream to Postgres: tasks stage them, and they are committed with the record in
one transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import COUNT, Effect
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches
from airflow_cdc_provider.engine.sinks.postgres.key_equality import TargetKey
from airflow_cdc_provider.engine.sinks.postgres.large_pieces import read_deposit, write_deposit
from airflow_cdc_provider.engine.sinks.postgres.record import PostgresRecord
from airflow_cdc_provider.engine.sinks.postgres.refused_values import refusals
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import gather
from airflow_cdc_provider.engine.sinks.postgres.staged_rows import rows_to_stage
from airflow_cdc_provider.engine.sinks.postgres.staging_tables import PostgresTableStatements
from airflow_cdc_provider.engine.sinks.staged import Share, Staged, StagedPiece
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable

T = TypeVar("T")
_NAMED = 100  # maximum number of tables in a statement


@dataclass(frozen=True)
class PostgresUnits(PostgresRecord):
    """The part of a Postgres sink that writes units."""

    def _write_deposit(self, tx: Connection, name: str, data: bytes | bytearray) -> None:
        rows(tx, "SET LOCAL synchronous_commit = off")
        write_deposit(tx, self._deposit(name), data)

    def _read_deposit(self, tx: Connection, name: str, size: int) -> bytearray:
        return read_deposit(tx, self._deposit(name), size)

    def _drop_deposits(self, tx: Connection, names: Collection[str] | None) -> None:
        if names is None:
            self._drop_unlogged(tx, self._deposit_prefix)
        for name in names or ():
            rows(tx, sql.SQL("DROP TABLE IF EXISTS {}").format(self._deposit(name)))

    def _deposit(self, name: str) -> sql.Composable:
        return sql.Identifier("airflow_cdc", f"{self._deposit_prefix}{name}")

    def _stage(self, connection: Connection, epoch: int, attempt: str, effects: Sequence[Effect]) -> Sequence[Staged]:
        staged = []
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
                statements = PostgresTableStatements(connection, target, self.mode)
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
        return staged

    def commit_as_staged(self, epoch: int, start: LogPosition, end: LogPosition, pieces: Iterator[StagedPiece]) -> bool:
        """Commit a unit while its last pieces are still being staged."""
        return self._commit(epoch, start, end, pieces, None)

    def _check_deferred(self, tx: Connection) -> None:
        rows(tx, "SET CONSTRAINTS ALL IMMEDIATE")

    def _table(self, tx: Connection, target: Target) -> TargetTable:
        return PostgresTableStatements(tx, target, self.mode)

    def _tables(self, tx: Connection, targets: Iterable[Target]) -> Mapping[str, TargetTable]:
        found = list(targets)
        keys = TargetKey.of_all(tx, found if self.mode == "mirror" else [])
        return {
            target.table.label: PostgresTableStatements(tx, target, self.mode, keys.get(target.table.label))
            for target in found
        }

    def _advance(self, tx: Connection, end: LogPosition) -> None:
        rows(
            tx,
            "UPDATE airflow_cdc.pipelines SET applied_lsn = %s, updated_at = clock_timestamp() WHERE pipeline = %s",
            [format_lsn(end), self.pipeline],
        )
        rows(
            tx,
            "DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND keys IS NOT NULL AND high_lsn <= %s",
            [self.pipeline, format_lsn(end)],
        )

    def _finish_unit(self, tx: Connection, relations: Sequence[str]) -> None:
        for some in _portions(relations):
            names = sql.SQL(", ").join(sql.Identifier("airflow_cdc", relation) for relation in some)
            rows(tx, sql.SQL("DROP TABLE {}").format(names))

    def _read_beyond(self, tx: Connection, high: LogPosition) -> str | None:
        query = "SELECT source_table FROM airflow_cdc.chunks WHERE pipeline = %s AND high_lsn > %s ORDER BY 1 LIMIT 1"
        for (label,) in rows(tx, query, [self.pipeline, format_lsn(high)]):
            return str(label)
        return None

    def _staged_counts(self, tx: Connection, relations: Sequence[str]) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        for some in _portions(relations):
            names = [sql.Identifier("airflow_cdc", relation).as_string(tx) for relation in some]
            query = (
                "SELECT to_regclass(name) IS NOT NULL FROM unnest(%s::text[]) WITH ORDINALITY AS u (name, n) ORDER BY n"
            )
            exists = [found for (found,) in rows(tx, query, [names])]
            there = [f"SELECT {n}, count(*) FROM {name}" for n, name in enumerate(names) if exists[n]]
            found = rows(tx, " UNION ALL ".join(there)) if there else []
            counts |= {some[n]: count for n, count in found}
        return counts

    def _sweep(self, tx: Connection) -> None:
        self._drop_unlogged(tx, self._staging_prefix)

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
        """Remove the commit record, everything staged and all deposits."""
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
        """Return a mark of fixed length, so that no pipeline's prefix begins another's."""
        return hashlib.sha256(self.pipeline.encode()).hexdigest()[:12]


def _portions(things: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield slices small enough to be named in one SQL statement."""
    return (things[start : start + _NAMED] for start in range(0, len(things), _NAMED))
