"""Staging tables of the Postgres sink, and the statements that apply them to a target table.

Staging columns are ``c0`` … in the order of the captured columns, with the types of the target. So values are parsed
while they are staged, in parallel; for few rows see :mod:`.shared_staging`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property, partial

import psycopg2
import pyarrow as pa
from psycopg.postgres import types
from psycopg2 import sql

from airflow_cdc_provider.engine.core.effect import ERASED, FRESH, MISSING, OLD_KIND, UNCHANGED
from airflow_cdc_provider.engine.core.errors import TargetConflict
from airflow_cdc_provider.engine.core.lsn import LogPosition, format_lsn
from airflow_cdc_provider.engine.core.record import FIRST_READ
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.postgres.connection import condition, rows
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches, copy_written, takes_binary
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import NEW, OLD
from airflow_cdc_provider.engine.sinks.postgres.refused_values import refusals
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import rows_of
from airflow_cdc_provider.engine.sinks.postgres.staging_ddl import StagingDdl
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable

# Constants of all rows of a chunk in a changelog, and their types.
_CONSTANTS = {"_op": '"char"', "_commit_lsn": "pg_lsn", "_seq": "bigint"}


class PostgresTableStatements(StagingDdl, TargetTable):
    """The statements on one target table, in the transaction of ``connection``; no other session changes the table
    meanwhile.

    :param key: key of the table, if it is known.
    """

    def apply(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Apply staged effects, and name a refused value."""
        with refusals(self._target, find=partial(self.refused_column, staged)):
            return super().apply(staged)

    def copy(self, read: SourceRows, applied: LogPosition, seq: int) -> int:
        constants: dict[str, str] = {}
        if self.mode == "changelog":
            # They sort after events up to the applied LSN and before the next commit's, whose _seq begins at 1.
            constants = {"_op": "r", "_commit_lsn": format_lsn(applied), "_seq": str(seq)}
        names = [*(column.name for column in self._target.table.columns), *constants]
        with refusals(self._target):
            if read.can_copy:
                oids = {column.name: column.type_oid for column in self._target.table.columns}
                oids |= {name: types[_CONSTANTS[name]].oid for name in constants}
                binary = takes_binary(self._connection, self._table, oids)
                data = read.copy_data([(text, _CONSTANTS[name]) for name, text in constants.items()], binary)
                return copy_written(self._connection, self._table, names, data, binary)
            batches = read.batches()
            if constants:
                batches = (_with_constants(batch, list(constants.values())) for batch in batches)
            return copy_batches(self._connection, self._table, names, batches)

    def empty(self) -> bool:
        return not self._run("SELECT 1 FROM {table} LIMIT 1")

    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        if keys is None:
            self._run("DELETE FROM {table}")
            return
        if not keys:
            return
        given, values = self._target_key.given("k", zip(*sorted(keys), strict=True))
        match = self._target_key.equal(self._stored(), values)
        self._run("DELETE FROM {table} t USING {given} WHERE {match}", given=given, match=match)

    def members(self, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> list[tuple[int, int]]:
        """Match keys against the keys of re-reads, by the target's equality."""
        given, ours = self._target_key.given("k", (column.to_pylist() for column in keys))
        among, theirs = self._target_key.given("m", zip(*members, strict=True))
        return rows(
            self._connection,
            sql.SQL("SELECT (k.position - 1)::int, (m.position - 1)::int FROM {} JOIN {} ON {}").format(
                given, among, self._target_key.equal(ours, theirs)
            ),
        )

    def log_delete(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        lsn = format_lsn(applied)
        before = self._run(f"SELECT max(_seq) FROM {{table}} WHERE _commit_lsn = '{lsn}' AND _seq < 1")[0][0]
        seq = FIRST_READ if before is None else int(str(before)) + 1
        names = list(self._target.table.key)
        # An omitted column would get its default, if someone has set one.
        present = [column.name for column in self._target.table.columns if column.name in self._present]
        statement = (
            "INSERT INTO {table} ({columns}_op, _commit_lsn, _seq, _xid, _commit_ts, _before, _unchanged) VALUES"
            f" ({{values}}{{op}}, '{lsn}', {seq}, NULL, clock_timestamp(), {{before}}, NULL)"
        )
        for op, key in [("t", None)] if keys is None else [("d", key) for key in sorted(keys)]:
            given = dict(zip(names, key, strict=True)) if key is not None else {}
            before = sql.SQL("jsonb_object({}::text[], {}::text[])").format(
                sql.Literal(names), sql.Literal(list(given.values()))
            )
            self._run(
                statement,
                columns=sql.SQL("").join(sql.SQL("{}, ").format(sql.Identifier(name)) for name in present),
                values=sql.SQL("").join(sql.SQL("{}, ").format(sql.Literal(given.get(name))) for name in present),
                op=sql.Literal(op),
                before=before if given else sql.SQL("NULL"),
            )
        return seq + 1

    def check_condition(self, where: str) -> None:
        """Check a condition on the rows without evaluating it."""
        self._run("EXPLAIN SELECT FROM {table} WHERE {where}", where=condition(where))

    def matching_keys(self, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of the rows that match a condition."""
        key = sql.SQL(", ").join(sql.SQL("format('%s', {})").format(self._names[i]) for i in self._key)
        found = self._run("SELECT {key} FROM {table} WHERE {where}", key=key, where=condition(where))
        return frozenset(tuple(str(value) for value in values) for values in found)

    def fill_missing(self, staged: Staged) -> set[tuple[str, ...]]:
        """Fill values that were not sent from the target's rows; return the keys of rows that do not exist there."""
        assert staged.relation is not None
        stage = sql.Identifier("airflow_cdc", staged.relation)
        packed = NEW in staged.columns
        places = [sql.SQL(f"{NEW}[{i + 1}]" if packed else f"c{i}") for i in range(len(self._names))]
        others = [i for i in range(len(self._names)) if i not in self._key]
        # concat() always calls the output function, unlike a cast.
        stored = "CASE WHEN t.{name} IS DISTINCT FROM NULL THEN concat(t.{name}) END" if packed else "t.{name}"
        value = f"CASE WHEN {{i}} = ANY(s.missing) THEN {stored} ELSE s.{{c}} END"
        values = {
            i: sql.SQL(value).format(c=places[i], i=sql.Literal(i), name=self._names[i])
            if i in others
            else sql.SQL("s.{}").format(places[i])
            for i in range(len(self._names))
        }
        if packed:
            assignments: sql.Composable = sql.SQL(f"{NEW} = ARRAY[{{}}]").format(sql.SQL(", ").join(values.values()))
        else:
            pairs = [sql.SQL("{} = {}").format(places[i], values[i]) for i in others]
            assignments = sql.SQL(", ").join(pairs)
        self._run(
            "UPDATE {stage} s SET missing = NULL, {assignments} FROM {table} t"
            " WHERE s.missing IS NOT NULL AND {origin}",
            stage=stage,
            assignments=assignments,
            origin=self._target_key.same(self._stored(), [sql.SQL(f"s.o{n}") for n in range(len(self._key))]),
        )
        key = sql.SQL(", ").join(sql.SQL("format('%s', {})").format(places[i]) for i in self._key)
        unfilled = self._run("SELECT {key} FROM {stage} WHERE missing IS NOT NULL", key=key, stage=stage)
        return {tuple(str(value) for value in found) for found in unfilled}

    def apply_mirror(self, staged: Staged) -> None:
        """Delete the erased keys, then upsert the rows.

        :raises TargetConflict: when two keys of the source are equal for the target.
        """
        stage = self.staged_rows(staged)
        others = [i for i in range(len(self._names)) if i not in self._key]
        gone: sql.Composable = sql.SQL("s.erased" if ERASED in staged.columns else "false")
        complete = " AND s.missing IS NULL" if MISSING in staged.columns else ""
        written: sql.Composable = sql.SQL("NOT {}" + complete).format(gone)
        anew = not self._identities_always.isdisjoint(self._target.table.columns[i].name for i in others)
        if anew or ERASED in staged.columns:
            self._run(
                "DELETE FROM {table} t USING {stage} s WHERE {gone} AND {match}",
                stage=stage,
                gone=sql.SQL("({} OR {})").format(gone, written) if anew else gone,
                match=self._target_key.same(self._stored(), self.staged_key()),
            )
        self._refuse_merging(stage, written)
        update: sql.Composable = sql.SQL("NOTHING")
        if others and not anew:
            pairs = [sql.SQL("{0} = excluded.{0}").format(self._names[i]) for i in others]
            update = sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(pairs))
        if FRESH in staged.columns and self._insert(stage, sql.SQL("{} AND s.fresh").format(written)):
            written = sql.SQL("{} AND NOT s.fresh").format(written)
        key = sql.SQL(", ").join(self._names[i] for i in self._key)
        self._write(stage, written, sql.SQL(" ON CONFLICT ({}) DO {}").format(key, update))

    def _insert(self, stage: sql.Composable, written: sql.Composable) -> bool:
        """Insert rows that should be new, in half the time of an upsert; return false if the target refuses them.

        One of them may exist already, or violate a constraint that holds only in the order of the log.
        """
        rows(self._connection, "SAVEPOINT fresh")
        try:
            self._write(stage, written, sql.SQL(""))
        except psycopg2.IntegrityError:
            rows(self._connection, "ROLLBACK TO SAVEPOINT fresh")
            return False
        rows(self._connection, "RELEASE SAVEPOINT fresh")
        return True

    def _write(self, stage: sql.Composable, written: sql.Composable, conflict: sql.Composable) -> None:
        self._run(
            # With an alias, so that a table named "excluded" is not confused with the rows to insert.
            "INSERT INTO {table} AS t ({names}) OVERRIDING SYSTEM VALUE"
            " SELECT {columns} FROM {stage} s WHERE {written}{conflict}",
            names=sql.SQL(", ").join(self._names),
            columns=sql.SQL(", ").join(sql.SQL(f"s.c{i}") for i in range(len(self._names))),
            stage=stage,
            written=written,
            conflict=conflict,
        )

    @cached_property
    def _present(self) -> frozenset[str]:
        """Return the columns of the target."""
        query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND NOT attisdropped"
        found = rows(self._connection, query, [self._table.as_string(self._connection)])
        return frozenset(str(name) for (name,) in found)

    @cached_property
    def _identities_always(self) -> frozenset[str]:
        """Return the columns that no UPDATE may set, so that rows have to be inserted again."""
        query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attidentity = 'a'"
        found = rows(self._connection, query, [self._table.as_string(self._connection)])
        return frozenset(str(name) for (name,) in found)

    def _refuse_merging(self, stage: sql.Composable, written: sql.Composable) -> None:
        """Refuse to overwrite another row; all old spellings of the keys have been deleted by now."""
        differ = self._target_key.differ(self._stored(), self.staged_key())
        if differ is None:
            return
        found = self._run(
            "SELECT ROW({ours})::text, ROW({theirs})::text FROM {table} t JOIN {stage} s ON {equal}"
            " WHERE {written} AND {differ} LIMIT 1",
            ours=sql.SQL(", ").join(self._stored()),
            theirs=sql.SQL(", ").join(self.staged_key()),
            stage=stage,
            equal=self._target_key.equal(self._stored(), self.staged_key()),
            written=written,
            differ=differ,
        )
        if found:
            raise TargetConflict(
                f"the key of the target table {self._target.schema}.{self._target.name} treats {found[0][0]} and"
                f" {found[0][1]} as equal, but they are two rows of {self._target.table.label}",
                "Give the target's key the types and collations of the source's unique index.",
            )

    def refused_column(self, staged: Staged) -> str | None:
        """Return the target's column that refuses a value of a mirror's rows in a shared relation.

        The transaction, in which the error occurred, ends.
        """
        if staged.share is None:
            return None  # COPY has accepted all of them
        with suppress(psycopg2.OperationalError):
            self._connection.rollback()
            try:
                alone = f"{staged.relation}_{staged.share.number}"
                self.create_mirror_staging(alone, staged.columns)
                for i, column in enumerate(self._target.table.columns):
                    try:
                        self._run(
                            f"INSERT INTO {{alone}} (c{i}) SELECT s.c{i} FROM {{stage}} s",
                            alone=sql.Identifier("airflow_cdc", alone),
                            stage=rows_of(staged, [f"c{i}"]),
                        )
                    except psycopg2.DataError:
                        return column.name
            finally:
                self._connection.rollback()
        return None

    def apply_counted(self, staged: Staged) -> None:
        """Delete and insert as many copies of rows as are staged.

        :raises TargetConflict: when the target lacks rows to delete.
        """
        stage = self.staged_rows(staged)
        columns = sql.SQL(", ").join(sql.SQL(f"s.c{i}") for i in range(len(self._names)))
        ((expected, deleted),) = self._run(
            "WITH matched AS ("
            "  SELECT t.tableoid, t.ctid, s.count, row_number() OVER (PARTITION BY s.ctid) AS copy"
            "  FROM {table} t JOIN {stage} s ON ROW({ours})::text = ROW({theirs})::text WHERE s.count < 0"
            "), gone AS ("
            "  DELETE FROM {table} t USING matched m"
            "  WHERE t.ctid = m.ctid AND t.tableoid = m.tableoid AND m.copy <= -m.count RETURNING 1"
            ") SELECT (SELECT -coalesce(sum(count), 0) FROM {stage} s WHERE count < 0), (SELECT count(*) FROM gone)",
            stage=stage,
            ours=sql.SQL(", ").join(sql.SQL("t.{}").format(name) for name in self._names),
            theirs=columns,
        )
        if expected != deleted:
            label = self._target.table.label
            raise TargetConflict(
                f"the target table {self._target.schema}.{self._target.name} holds {deleted} of {expected} rows that"
                f" {label} has deleted; something else has changed it",
                f"Run `airflow-cdc resnapshot --table {label}` to read the table again, then start again.",
            )
        self._run(
            "INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {stage} s,"
            " generate_series(1, s.count) WHERE s.count > 0",
            names=sql.SQL(", ").join(self._names),
            columns=columns,
            stage=stage,
        )

    def apply_changelog(self, staged: Staged) -> None:
        width = range(len(self._names))
        before: sql.Composable = sql.SQL("NULL::jsonb")
        if OLD_KIND in staged.columns:
            before = sql.SQL("CASE old_kind WHEN 'K' THEN {} WHEN 'O' THEN {} END").format(
                self._json(self._key, OLD in staged.columns), self._json(width, OLD in staged.columns)
            )
        self._run(
            "INSERT INTO {table} ({names}, _op, _commit_lsn, _seq, _xid, _commit_ts, _before, _unchanged)"
            " OVERRIDING SYSTEM VALUE SELECT {columns}, op, '0/0'::pg_lsn + commit_lsn, seq, xid,"
            " to_timestamp(0) + commit_ts * interval '1 microsecond', {before}, "
            + (UNCHANGED if UNCHANGED in staged.columns else "NULL")
            + " FROM {stage} s ORDER BY commit_lsn, seq",
            names=sql.SQL(", ").join(self._names),
            columns=sql.SQL(", ").join(sql.SQL(f"c{i}") for i in width),
            before=before,
            stage=self.staged_rows(staged),
        )

    def _json(self, columns: Sequence[int], packed: bool) -> sql.Composable:
        """Return a JSON object of some columns of the old row, as texts."""
        names = [self._target.table.columns[i].name for i in columns]
        values = sql.SQL(", ").join(sql.SQL(f"{OLD}[{i + 1}]" if packed else f"b{i}") for i in columns)
        return sql.SQL("jsonb_object({}::text[], ARRAY[{}]::text[])").format(sql.Literal(names), values)


def _with_constants(batch: pa.RecordBatch, values: Sequence[str]) -> pa.RecordBatch:
    constants = [pa.repeat(pa.scalar(value), batch.num_rows) for value in values]
    names = [f"f{i}" for i in range(batch.num_columns + len(values))]
    return pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)
