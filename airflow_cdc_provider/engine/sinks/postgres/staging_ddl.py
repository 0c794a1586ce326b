"""Creates and reads the staging tables of a target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import COUNT, ERASED, FRESH, MISSING, OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.record import Mode, Target
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.sinks.postgres.column_types import domain_bases
from airflow_cdc_provider.engine.sinks.postgres.key_equality import TargetKey
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import NEW, OLD, unpacked
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import rows_of
from airflow_cdc_provider.engine.sinks.staged import Staged


class StagingDdl:
    """Statements that create the staging tables of a target and read their rows."""

    def __init__(self, connection: Connection, target: Target, mode: Mode, key: TargetKey | None = None) -> None:
        self._connection = connection
        self.mode = mode
        self._known_key = key
        self._target = target
        self._table = sql.Identifier(target.schema, target.name)
        self._names = [sql.Identifier(column.name) for column in target.table.columns]
        columns = [column.name for column in target.table.columns]
        self._key = [columns.index(name) for name in target.table.key]

    def _run(self, text: str, **parts: sql.Composable) -> list[tuple[object, ...]]:
        return rows(self._connection, sql.SQL(text).format(table=self._table, **parts))

    @cached_property
    def _target_key(self) -> TargetKey:
        return self._known_key or TargetKey.of_all(self._connection, [self._target])[self._target.table.label]

    def _stored(self) -> list[sql.Composable]:
        """Return the key of a row ``t`` of the target."""
        return [sql.SQL("t.{}").format(self._names[i]) for i in self._key]

    def staged_key(self) -> list[sql.Composable]:
        """Return the key of a staged row ``s``."""
        return [sql.SQL(f"s.c{i}") for i in self._key]

    def equal_to(self, key: Sequence[sql.Composable]) -> sql.Composable:
        """Return the condition that the key of a row ``t`` of the target equals another key, by the target's rules."""
        return self._target_key.equal(self._stored(), key)

    def given_keys(self, keys: Sequence[tuple[str, ...]]) -> tuple[sql.Composable, list[sql.Composable]]:
        """Return a relation of keys that are given as texts, and the expressions of their values."""
        return self._target_key.given("k", zip(*keys, strict=True))

    def create_mirror_staging(self, relation: str, columns: Sequence[str]) -> None:
        """Create a staging table for mirror rows, see :class:`.effects.Effect`."""
        fields: list[sql.Composable] = [sql.SQL(f"true AS {ERASED}")] if ERASED in columns else []
        staged = self._staged
        fields += self._new_row(columns)
        if MISSING in columns:
            fields.append(sql.SQL(f"NULL::int[] AS {MISSING}"))
            fields += [sql.SQL(f"{{}} AS o{n}").format(staged[i]) for n, i in enumerate(self._key)]
        if FRESH in columns:
            fields.append(sql.SQL(f"true AS {FRESH}"))
        self._create_staging(relation, fields)

    def _new_row(self, columns: Sequence[str]) -> list[sql.Composable]:
        """Return the staging columns for the captured ones."""
        if NEW in columns:
            return [sql.SQL(f"NULL::text[] AS {NEW}")]
        return [sql.SQL(f"{{}} AS c{i}").format(column) for i, column in enumerate(self._staged)]

    def create_counted_staging(self, relation: str, columns: Sequence[str]) -> None:
        """Create a staging table for the rows of a mirror without a key, see :class:`.effects.Effect`."""
        self._create_staging(relation, [sql.SQL(f"NULL::bigint AS {COUNT}"), *self._new_row(columns)])

    def create_changelog_staging(self, relation: str, columns: Sequence[str]) -> None:
        """Create a staging table for changelog rows, see :class:`.effects.Effect`."""
        types = {OP: '"char"', "commit_lsn": "bigint", "seq": "bigint", "xid": "bigint", "commit_ts": "bigint"}
        types |= {UNCHANGED: "text[]", OLD_KIND: '"char"', NEW: "text[]", OLD: "text[]"}
        fields: list[sql.Composable] = []
        staged = self._staged
        for name in columns:
            if name in types:
                fields.append(sql.SQL(f"NULL::{types[name]} AS {name}"))
            elif name.startswith("c"):
                fields.append(sql.SQL(f"{{}} AS {name}").format(staged[int(name[1:])]))
            else:
                fields.append(sql.SQL(f"NULL::text AS {name}"))
        self._create_staging(relation, fields)

    @cached_property
    def _staged(self) -> list[sql.Composable]:
        """Return expressions with the types of the staging columns: the target's columns, with base types for domains.

        A domain may forbid the NULL of an erased row or of a value that was not sent.
        """
        domains = domain_bases(self._connection, self._table)
        names = [column.name for column in self._target.table.columns]
        return [
            sql.SQL("t.{}::{}").format(quoted, sql.SQL(domains[name]))
            if name in domains
            else sql.SQL("t.{}").format(quoted)
            for name, quoted in zip(names, self._names, strict=True)
        ]

    def staged_rows(self, staged: Staged) -> sql.Composable:
        """Return the staged rows of a table, in any form of staging."""
        if NEW not in staged.columns:
            return rows_of(staged)
        assert staged.relation is not None
        table = self._table.as_string(self._connection)
        query = (
            "SELECT attname::text, format_type(atttypid, -1) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        types = dict(rows(self._connection, query, [table])) | domain_bases(
            self._connection, self._table, modifiers=False
        )
        names = [column.name for column in self._target.table.columns]
        return unpacked(sql.Identifier("airflow_cdc", staged.relation), staged.columns, types, names)

    def _create_staging(self, relation: str, fields: Sequence[sql.Composable]) -> None:
        self._run(
            "CREATE UNLOGGED TABLE {stage} WITH (autovacuum_enabled = off) AS SELECT {fields} FROM {table} t"
            " WITH NO DATA",
            stage=sql.Identifier("airflow_cdc", relation),
            fields=sql.SQL(", ").join(fields),
        )
