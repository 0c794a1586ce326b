"""Staging tables of the Postgres sink, and the statements that bring them into a target table.

Staging columns are ``c0`` … in the order of the captured columns, with the types of
the target, so that values are parsed where they are staged and in parallel; but see
:mod:`.shared_staging` for few rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from airflow_cdc_provider.engine.postgres.connection import condition, rows
from airflow_cdc_provider.engine.sinks.contract import Copyable
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches, copy_written, takes_binary
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import NEW, OLD
from airflow_cdc_provider.engine.sinks.postgres.refused_values import refusals
from airflow_cdc_provider.engine.sinks.postgres.shared_staging import rows_of
from airflow_cdc_provider.engine.sinks.postgres.staging_ddl import StagingDdl
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable

# What all rows of a chunk have in common in a changelog, and its types there.
_CONSTANTS = {"_op": '"char"', "_commit_lsn": "pg_lsn", "_seq": "bigint"}


class TableStatements(StagingDdl, TargetTable):
    """What is done to one target table, in the transaction of ``connection``; nobody else changes it meanwhile.

    :param key: of the table, if it is known.
    """

    def apply(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """See :meth:`.TargetTable.apply`; a value that is refused is named."""
        with refusals(self._target, find=partial(self.refused_column, staged)):
            return super().apply(staged)

    def copy(self, batches: Iterator[pa.RecordBatch], applied: LogPosition, seq: int) -> int:
        """See :meth:`.TargetTable.copy`."""
        constants: dict[str, str] = {}
        if self.mode == "changelog":
            # They sort after events up to the applied LSN and before the next commit's, whose _seq begins at 1.
            constants = {"_op": "r", "_commit_lsn": format_lsn(applied), "_seq": str(seq)}
        names = [*(column.name for column in self._target.table.columns), *constants]
        with refusals(self._target):
            if isinstance(batches, Copyable):
                oids = {column.name: column.type_oid for column in self._target.table.columns}
                oids |= {name: types[_CONSTANTS[name]].oid for name in constants}
                binary = takes_binary(self._connection, self._table, oids)
                written = batches.copied([(text, _CONSTANTS[name]) for name, text in constants.items()], binary)
                return copy_written(self._connection, self._table, names, written, binary)
            if constants:
                batches = (_with_constants(batch, list(constants.values())) for batch in batches)
            return copy_batches(self._connection, self._table, names, batches)

    def empty(self) -> bool:
        """Whether the target has no rows."""
        return not self._run("SELECT 1 FROM {table} LIMIT 1")

    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        """Delete the rows with the given keys, all rows when ``None``."""
        if keys is None:
            self._run("DELETE FROM {table}")
            return
        if not keys:
            return
        given, values = self._target_key.given("k", zip(*sorted(keys), strict=True))
        match = self._target_key.equal(self._stored(), values)
        self._run("DELETE FROM {table} t USING {given} WHERE {match}", given=given, match=match)

    def members(self, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> list[tuple[int, int]]:
        """Which keys are which members; see :meth:`.contract.Sink.members`."""
        given, ours = self._target_key.given("k", (column.to_pylist() for column in keys))
        among, theirs = self._target_key.given("m", zip(*members, strict=True))
        return rows(
            self._connection,
            sql.SQL("SELECT (k.position - 1)::int, (m.position - 1)::int FROM {} JOIN {} ON {}").format(
                given, among, self._target_key.equal(ours, theirs)
            ),
        )

    def log_delete(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        """See :meth:`.TargetTable.log_delete`."""
        lsn = format_lsn(applied)
        before = self._run(f"SELECT max(_seq) FROM {{table}} WHERE _commit_lsn = '{lsn}' AND _seq < 1")[0][0]
        seq = FIRST_READ if before is None else int(str(before)) + 1
        names = list(self._target.table.key)
        # One that is left out gets what somebody has given it as a default.
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
        """Let the server judge a condition on the rows."""
        self._run("EXPLAIN SELECT FROM {table} WHERE {where}", where=condition(where))

    def matching_keys(self, where: str) -> frozenset[tuple[str, ...]]:
        """The keys of the rows that match a condition."""
        key = sql.SQL(", ").join(sql.SQL("format('%s', {})").format(self._names[i]) for i in self._key)
        found = self._run("SELECT {key} FROM {table} WHERE {where}", key=key, where=condition(where))
        return frozenset(tuple(str(value) for value in values) for values in found)

    def fill_missing(self, staged: Staged) -> set[tuple[str, ...]]:
        """Fill values that were not sent from the target's rows; return the keys of rows that have none there."""
        assert staged.relation is not None
        stage = sql.Identifier("airflow_cdc", staged.relation)
        packed = NEW in staged.columns
        places = [sql.SQL(f"{NEW}[{i + 1}]" if packed else f"c{i}") for i in range(len(self._names))]
        others = [i for i in range(len(self._names)) if i not in self._key]
        # concat() calls the output function; a cast does not always.
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
        """Delete the keys that are gone, then upsert the rows.

        :raises TargetConflict: when the target takes two keys of the source for one.
        """
        stage = self._rows_of(staged)
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
                match=self._target_key.same(self._stored(), self._staged_key()),
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
        """Insert rows that should be new, in half the time of an upsert; false when the target refuses.

        One may be there already, or break a constraint that it keeps in the order of the log, among the others.
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
            # Under an alias, lest a table named "excluded" be taken for the rows to insert.
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
        """The columns that the target has."""
        query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND NOT attisdropped"
        found = rows(self._connection, query, [self._table.as_string(self._connection)])
        return frozenset(str(name) for (name,) in found)

    @cached_property
    def _identities_always(self) -> frozenset[str]:
        """The columns that no UPDATE may set, so that rows have to be inserted anew."""
        query = "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attidentity = 'a'"
        found = rows(self._connection, query, [self._table.as_string(self._connection)])
        return frozenset(str(name) for (name,) in found)

    def _refuse_merging(self, stage: sql.Composable, written: sql.Composable) -> None:
        """Refuse to write over another row: all old spellings of the keys have been deleted by now."""
        differ = self._target_key.differ(self._stored(), self._staged_key())
        if differ is None:
            return
        found = self._run(
            "SELECT ROW({ours})::text, ROW({theirs})::text FROM {table} t JOIN {stage} s ON {equal}"
            " WHERE {written} AND {differ} LIMIT 1",
            ours=sql.SQL(", ").join(self._stored()),
            theirs=sql.SQL(", ").join(self._staged_key()),
            stage=stage,
            equal=self._target_key.equal(self._stored(), self._staged_key()),
            written=written,
            differ=differ,
        )
        if found:
            raise TargetConflict(
                f"the key of the target table {self._target.schema}.{self._target.name} takes {found[0][0]} and"
                f" {found[0][1]} for one, which are two rows of {self._target.table.label}",
                "Give the target's key the types and collations by which the source's unique index compares.",
            )

    def refused_column(self, staged: Staged) -> str | None:
        """The target's column that refuses a value of a mirror's rows, if they stand in a relation that others share.

        The transaction, in which that has been an error, ends.
        """
        if staged.share is None:
            return None  # COPY has taken all of them
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

        :raises TargetConflict: when the target lacks rows that are to be deleted.
        """
        stage = self._rows_of(staged)
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
                f"of {expected} rows that {label} has lost, the target table {self._target.schema}.{self._target.name}"
                f" holds {deleted}: something else has changed it",
                f"Run `airflow-cdc resnapshot --table {label}`, which reads the table again, then start again.",
            )
        self._run(
            "INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {stage} s,"
            " generate_series(1, s.count) WHERE s.count > 0",
            names=sql.SQL(", ").join(self._names),
            columns=columns,
            stage=stage,
        )

    def apply_changelog(self, staged: Staged) -> None:
        """Append the changes."""
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
            stage=self._rows_of(staged),
        )

    def _json(self, columns: Sequence[int], packed: bool) -> sql.Composable:
        """A JSON object of some columns of the old row, as texts."""
        names = [self._target.table.columns[i].name for i in columns]
        values = sql.SQL(", ").join(sql.SQL(f"{OLD}[{i + 1}]" if packed else f"b{i}") for i in columns)
        return sql.SQL("jsonb_object({}::text[], ARRAY[{}]::text[])").format(sql.Literal(names), values)


def _with_constants(batch: pa.RecordBatch, values: Sequence[str]) -> pa.RecordBatch:
    constants = [pa.repeat(pa.scalar(value), batch.num_rows) for value in values]
    names = [f"f{i}" for i in range(batch.num_columns + len(values))]
    return pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)
