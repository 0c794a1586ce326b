"""Staging tables of the MySQL sink, and the statements that apply them to a target table.

Staging columns are ``c0`` … in the order of the captured columns, with the types of the target. So values are converted
while they are staged, in parallel. Except for the creation of such a table, no statement here ends the transaction that
it runs in: rows are removed by DELETE, never by TRUNCATE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.comparison.side import RowKey
from airflow_cdc_provider.engine.core.effect import ERASED, MISSING, OLD_KIND, OP, UNCHANGED
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ, Target
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.sinks.mysql.bulk_load import Field, Loader, constant
from airflow_cdc_provider.engine.sinks.mysql.session import Session, literally, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.table_definition import CHANGELOG_COLUMNS, Mode
from airflow_cdc_provider.engine.sinks.mysql.types import (
    COUNTER,
    FLAG,
    LETTER,
    POSITION,
    WORDS,
    ArrayText,
    MysqlColumnType,
    column_types,
    json_of,
)
from airflow_cdc_provider.engine.sinks.staged import Staged
from airflow_cdc_provider.engine.sinks.transactional.target_table import TargetTable

_FILLED = "filled"
_STAGED_KINDS = {
    ERASED: FLAG,
    MISSING: WORDS,
    OP: LETTER,
    "commit_lsn": POSITION,
    "seq": COUNTER,
    "xid": POSITION,
    "commit_ts": COUNTER,
    "before_": WORDS,
    UNCHANGED: WORDS,
}
_READ_ROWS = 5_000
_Texts = pa.large_string()


class MysqlTableStatements(TargetTable):
    """The statements on one target table, in the transaction of ``session``."""

    def __init__(self, session: Session, target: Target, mode: Mode) -> None:
        self._session = session
        self._target = target
        self.mode = mode
        self._label = target.table.label
        self._table = quoted(target.schema, target.name)
        self._kinds = column_types(target.table)
        names = [column.name for column in target.table.columns]
        self._names = [quoted(name) for name in names]
        self._fields = [Field(name, self._kinds[name]) for name in names]
        self._key = [names.index(name) for name in target.table.key]

    def _loader(self) -> Loader:
        return Loader(self._session)

    # -- rows of the target ------------------------------------------------------------------------

    def apply(self, staged: Staged) -> Collection[tuple[str, ...]]:
        """Apply staged effects, and name the table if a row is too large."""
        with row_of(self._label):
            return super().apply(staged)

    def copy(self, rows: SourceRows, applied: LogPosition, seq: int) -> int:
        return self.copy_to(self._table, rows, applied, seq)

    def copy_to(self, table: str, rows: SourceRows, applied: LogPosition, seq: int) -> int:
        """Copy rows into a table that will replace the target, given by its quoted name."""
        fields, batches = list(self._fields), rows.batches()
        if self.mode == "changelog":
            # They sort after events up to the applied LSN and before the next commit's, whose _seq begins at 1.
            meta = {"_op": "r", "_commit_lsn": str(applied), "_seq": str(seq)}
            fields += [Field(name, CHANGELOG_COLUMNS[name]) for name in meta]
            batches = (_with_constants(batch, list(meta.values())) for batch in batches)
        return self._loader().load(table, fields, batches, self._label)

    def empty(self) -> bool:
        return not self._session.rows(f"SELECT 1 FROM {self._table} LIMIT 1")

    def delete(self, keys: frozenset[tuple[str, ...]] | None) -> None:
        if keys is None:
            self._session.run(f"DELETE FROM {self._table}")
            return
        names = ", ".join(self._names[i] for i in self._key)
        for start in range(0, len(keys), 1000):
            group = sorted(keys)[start : start + 1000]
            places = ", ".join(f"({', '.join(self._constants(key))})" for key in group)
            self._session.run(f"DELETE FROM {self._table} WHERE ({names}) IN ({places})")

    def _constants(self, key: RowKey) -> list[str]:
        """Return a key as SQL."""
        return [constant(self._fields[i], str(text), self._label) for i, text in zip(self._key, key, strict=True)]

    def members(self, members: Sequence[tuple[str, ...]], keys: Sequence[pa.Array]) -> list[tuple[int, int]]:
        """Match keys against the keys of re-reads; with these types, few different texts are equal."""
        forms = [self._fields[i].kind.canonical for i in self._key]

        def canonical(key: Sequence[str]) -> tuple[object, ...]:
            return tuple(_canonical(form, text) for form, text in zip(forms, key, strict=True))

        places: dict[tuple[object, ...], list[int]] = {}
        for place, member in enumerate(members):
            places.setdefault(canonical(member), []).append(place)
        texts = zip(*(column.to_pylist() for column in keys), strict=True)
        return [(n, place) for n, key in enumerate(texts) for place in places.get(canonical(key), ())]

    def log_delete(self, keys: frozenset[tuple[str, ...]] | None, applied: LogPosition) -> int:
        table = literally(self._table)
        (before,) = self._session.one(f"SELECT MAX(_seq) FROM {table} WHERE _commit_lsn = %s AND _seq < 1", [applied])
        seq = FIRST_READ if before is None else int(before) + 1
        # Every column is named, so that none gets a default.
        names = literally(", ".join(self._names))
        insert = f"INSERT INTO {table} ({names}, _op, _commit_lsn, _seq, _commit_ts, _before) VALUES"
        if keys is None:
            nothing = ", ".join(["NULL"] * len(self._names))
            self._session.run(f"{insert} ({nothing}, 't', %s, %s, NOW(6), NULL)", [applied, seq])
            return seq + 1
        for key in sorted(keys):
            known = dict(zip(self._key, self._constants(key), strict=True))
            values = literally(", ".join(known.get(i, "NULL") for i in range(len(self._names))))
            before_ = json_of(dict(zip(self._target.table.key, key, strict=True)))
            self._session.run(f"{insert} ({values}, 'd', %s, %s, NOW(6), %s)", [applied, seq, before_])
        return seq + 1

    def check_condition(self, where: str) -> None:
        """Check a condition on the rows without evaluating it."""
        self._session.run(f"EXPLAIN SELECT 1 FROM {self._table} WHERE ({where}\n)")

    def matching_keys(self, where: str) -> frozenset[tuple[str, ...]]:
        """Return the keys of the rows that match a condition."""
        return self._keys_where(self._table, self._names, f"({where}\n)")

    def _keys_where(self, table: str, names: Sequence[str], where: str) -> frozenset[tuple[str, ...]]:
        shown = ", ".join(self._fields[i].kind.read.format(names[i]) for i in self._key)
        found: set[tuple[str, ...]] = set()
        for group in self._session.stream(f"SELECT {shown} FROM {table} WHERE {where}", _READ_ROWS):
            columns = zip(*group, strict=True)
            texts = [self._fields[i].kind.decode(_array(column)) for i, column in zip(self._key, columns, strict=True)]
            found |= set(zip(*(text.to_pylist() for text in texts), strict=True))
        return frozenset(found)

    def rows(self, keys: Sequence[RowKey] | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows as Postgres texts, see :meth:`.sink.MysqlSink.rows`."""
        kinds = {field.name: field.kind for field in self._fields}
        if self.mode == "changelog":
            kinds |= {name: CHANGELOG_COLUMNS[name] for name in ("_op", "_commit_lsn", "_seq", "_before", "_unchanged")}
        shown = ", ".join(kind.read.format(quoted(name)) for name, kind in kinds.items())
        condition = ""
        if keys is not None and self.mode == "mirror":
            if not keys:
                return
            names = ", ".join(self._names[i] for i in self._key)
            places = ", ".join(f"({', '.join(self._constants(key))})" for key in keys)
            condition = f" WHERE ({names}) IN ({places})"
        for group in self._session.stream(f"SELECT {shown} FROM {self._table}{condition}", _READ_ROWS):
            columns = dict(zip(kinds, map(_array, zip(*group, strict=True)), strict=True))
            texts = {name: kinds[name].decode(column) for name, column in columns.items()}
            if self.mode == "changelog":
                texts["_commit_lsn"] = _each_text(
                    texts["_commit_lsn"], lambda n: f"{int(n) >> 32:X}/{int(n) & 0xFFFFFFFF:X}"
                )
                texts["_unchanged"] = _each_text(texts["_unchanged"], ArrayText("text").from_json)
            yield pa.RecordBatch.from_arrays([text.cast(pa.string()) for text in texts.values()], names=list(texts))

    # -- staging -----------------------------------------------------------------------------------

    def create_staging(self, relation: str, columns: Sequence[str]) -> None:
        """Create a staging table with some columns of :func:`staged_rows`; this ends a transaction."""
        fields = [
            f"{field.name} {field.kind.definition(self._session.collation)} NULL" for field in self._staged(columns)
        ]
        if MISSING in columns:
            fields.append(f"{_FILLED} TINYINT NOT NULL DEFAULT 0")
        with row_of(self._label):
            self._session.run(
                f"CREATE TABLE {quoted('airflow_cdc', relation)} ({', '.join(fields)}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC"
            )

    def fill_staging(self, relation: str, rows: pa.Table) -> int:
        """Load rows into a staging table, and return their number."""
        fields = self._staged(rows.column_names)
        return self._loader().load(quoted("airflow_cdc", relation), fields, rows.to_batches(), self._label)

    def _staged(self, columns: Sequence[str]) -> list[Field]:
        return [Field(name, self._staged_kind(name), self._title(name)) for name in columns]

    def _staged_kind(self, name: str) -> MysqlColumnType:
        if name in _STAGED_KINDS:
            return _STAGED_KINDS[name]
        number = int(name[1:])
        return self._fields[self._key[number] if name[0] == "o" else number].kind

    def _title(self, name: str) -> str:
        return "" if name in _STAGED_KINDS else self._fields[int(name[1:])].name

    def staged_rows(self, rows: pa.Table) -> pa.Table:
        """Return the rows of an effect as they are staged, see :class:`.effects.Effect`.

        For a mirror, ``missing`` becomes a list for ``FIND_IN_SET``. For a changelog, the old row becomes JSON.
        """
        columns = dict(zip(rows.column_names, rows.columns, strict=True))
        if MISSING in columns:
            columns[MISSING] = pc.utf8_trim(columns[MISSING], "{}")
        if self.mode == "changelog":
            if UNCHANGED in columns:
                columns[UNCHANGED] = _each_text(columns[UNCHANGED], _json_array)
            if OLD_KIND in columns:
                columns["before_"] = self._before(columns)
            columns = {n: c for n, c in columns.items() if n != OLD_KIND and not re.fullmatch(r"b\d+", n)}
        return pa.table(columns).combine_chunks()

    def _before(self, columns: dict[str, pa.ChunkedArray]) -> pa.Array:
        names = [column.name for column in self._target.table.columns]
        olds = [columns[f"b{i}"].to_pylist() for i in range(len(names))]
        made: list[str | None] = []
        for row, kind in enumerate(columns[OLD_KIND].to_pylist()):
            chosen = self._key if kind == "K" else range(len(names))
            made.append(json_of({names[i]: olds[i][row] for i in chosen}) if kind in ("K", "O") else None)
        return pa.array(made, _Texts)

    # -- a unit ------------------------------------------------------------------------------------

    def _equal(self, staged: str, alias: str = "t") -> str:
        """Return the condition that a row of the target has the key of a staged row ``s``."""
        pairs = [(self._names[i], f"s.{staged}{i if staged == 'c' else n}") for n, i in enumerate(self._key)]
        return " AND ".join(f"{alias}.{name} = {other}" for name, other in pairs)

    def fill_missing(self, staged: Staged) -> frozenset[tuple[str, ...]]:
        """Fill values that were not sent from the target's rows; return the keys of rows that do not exist there."""
        assert staged.relation is not None
        stage = quoted("airflow_cdc", staged.relation)
        values = [
            f"s.c{i} = IF(FIND_IN_SET('{i}', s.missing), t.{name}, s.c{i})"
            for i, name in enumerate(self._names)
            if i not in self._key
        ]
        self._session.run(
            f"UPDATE {stage} s STRAIGHT_JOIN {self._table} t ON {self._equal('o')}"
            f" SET {', '.join(values)}, s.{_FILLED} = 1 WHERE s.missing IS NOT NULL"
        )
        names = [f"c{i}" for i in range(len(self._names))]
        return self._keys_where(stage, names, f"missing IS NOT NULL AND {_FILLED} = 0")

    def apply_mirror(self, staged: Staged) -> None:
        """Delete removed keys, then update existing rows, and insert the others.

        ON DUPLICATE KEY UPDATE is not usable: because of a user's unique index, it could overwrite another row.
        """
        assert staged.relation is not None
        stage, equal = quoted("airflow_cdc", staged.relation), self._equal("c")
        written = "s.erased = 0" + (f" AND (s.missing IS NULL OR s.{_FILLED} = 1)" if MISSING in staged.columns else "")
        gone = self._equal("c", self._table)  # for an alias, the server would need the name of the database
        self._session.run(
            f"DELETE {self._table} FROM {stage} s STRAIGHT_JOIN {self._table} ON {gone} WHERE s.erased = 1"
        )
        others = [f"t.{name} = s.c{i}" for i, name in enumerate(self._names) if i not in self._key]
        if others:
            self._session.run(
                f"UPDATE {stage} s STRAIGHT_JOIN {self._table} t ON {equal} SET {', '.join(others)} WHERE {written}"
            )
        self._session.run(
            f"INSERT INTO {self._table} ({', '.join(self._names)})"
            f" SELECT {', '.join(f's.c{i}' for i in range(len(self._names)))} FROM {stage} s"
            f" LEFT JOIN {self._table} t ON {equal} WHERE {written} AND t.{self._names[self._key[0]]} IS NULL"
        )

    def apply_changelog(self, staged: Staged) -> None:
        """Append the changes."""
        assert staged.relation is not None
        optional = [column if column in staged.columns else "NULL" for column in ("before_", UNCHANGED)]
        self._session.run(
            f"INSERT INTO {self._table} ({', '.join(self._names)}, _op, _commit_lsn, _seq, _xid, _commit_ts, _before,"
            f" _unchanged) SELECT {', '.join(f'c{i}' for i in range(len(self._names)))}, op, commit_lsn, seq, xid,"
            f" TIMESTAMP'1970-01-01 00:00:00' + INTERVAL commit_ts MICROSECOND, {', '.join(optional)}"
            f" FROM {quoted('airflow_cdc', staged.relation)} ORDER BY commit_lsn, seq"
        )


def _canonical(form: Callable[[str], object], text: str) -> object:
    """Return a key's text in a form that is the same for equal keys; texts of an earlier type stay as they are."""
    try:
        return form(text)
    except (ValueError, ArithmeticError):
        return text


def _with_constants(batch: pa.RecordBatch, values: Sequence[str]) -> pa.RecordBatch:
    constants = [pa.repeat(pa.scalar(value, _Texts), batch.num_rows) for value in values]
    names = [f"f{i}" for i in range(batch.num_columns + len(values))]
    return pa.RecordBatch.from_arrays([*batch.columns, *constants], names=names)


def _array(column: Sequence[str | bytes | None]) -> pa.Array:
    """Return a column of values sent by the server."""
    return pa.array([value.decode() if isinstance(value, bytes) else value for value in column], _Texts)


def _each_text(texts: pa.Array, function: Callable[[str], str]) -> pa.Array:
    made = [None if text is None else function(text) for text in texts.to_pylist()]
    return pa.array(made, _Texts)


def _json_array(literal: str) -> str:
    """Return the names in an array's literal, in which each name is quoted."""
    names = re.findall(r'"((?:[^"\\]|\\.)*)"', literal, re.DOTALL)
    return json.dumps([re.sub(r"\\(.)", r"\1", name, flags=re.DOTALL) for name in names], ensure_ascii=False)
