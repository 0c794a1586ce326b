"""Loads Arrow rows into a table: by LOAD DATA LOCAL INFILE if both sides allow it, otherwise by multi-row INSERT.

The loaded text is built column by column, without a Python loop per row. LOAD DATA LOCAL is lenient in any SQL mode: it
changes values that do not fit, skips rows whose key exists, and only warns. So every warning is an error here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.errors import LimitExceeded, ValueRefused
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import row_of
from airflow_cdc_provider.engine.sinks.mysql.types import MysqlColumnType, join_texts

_LOAD_BYTES = 8 << 20
_SHOWN = 60

_Texts = pa.large_string()


@dataclass(frozen=True)
class Field:
    """A column that is loaded.

    :param name: name of the column in the loaded table.
    :param title: name of the column for messages.
    """

    name: str
    kind: MysqlColumnType
    title: str = ""


class Loader:
    """Loads rows into tables, in the transaction of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        local, packet = session.one("SELECT @@local_infile, @@max_allowed_packet")
        self._local = bool(local)
        self._packet = int(packet)

    def load(self, table: str, fields: Sequence[Field], batches: Iterable[pa.RecordBatch], label: str) -> int:
        """Load batches, whose columns are those of ``fields`` in order, into a table.

        :param table: its quoted name.
        :param label: label of the source table, for messages.
        :returns: rows loaded.
        :raises LimitExceeded: when MySQL cannot hold a value.
        :raises ValueRefused: when the table cannot.
        """
        count = 0
        for batch in batches:
            for part in _parts(batch):
                columns = [
                    _loaded(field, column, label, self._packet)
                    for field, column in zip(fields, part.columns, strict=True)
                ]
                load = self._load_file if self._local else self._insert
                with row_of(label):
                    load(table, fields, columns, part.num_rows, label)
                count += part.num_rows
        return count

    def _load_file(
        self, table: str, fields: Sequence[Field], columns: Sequence[pa.Array], count: int, label: str
    ) -> None:
        names, settings = [], []
        for number, field in enumerate(fields):
            if field.kind.hexadecimal:
                names.append(f"@v{number}")
                settings.append(f"{quoted(field.name)} = UNHEX(@v{number})")
            else:
                names.append(quoted(field.name))
        cells = [pc.fill_null(_cell(column, field.kind), "NULL") for column, field in zip(columns, fields, strict=True)]
        lines = join_texts(join_texts(*cells, between=","), "\n")
        assigned = f" SET {', '.join(settings)}" if settings else ""
        loaded = self._session.load(
            f"{table} CHARACTER SET utf8mb4"
            " FIELDS TERMINATED BY ',' OPTIONALLY ENCLOSED BY '\"' ESCAPED BY '' LINES TERMINATED BY '\\n'"
            f" ({', '.join(names)}){assigned}",
            _bytes(lines),
            self._packet,
        )
        # The server keeps only a configured number of messages, possibly none, but counts all of them.
        (warned,) = self._session.one("SHOW COUNT(*) WARNINGS")
        if warned or loaded != count:
            messages = self._session.rows("SHOW WARNINGS LIMIT 1") if warned else []
            said = messages[0][2] if messages else f"{loaded} of {count} rows were loaded, {warned} values were changed"
            raise ValueRefused(
                f"the target table of {label} cannot hold a value: {said}",
                "Nothing of the unit was applied. Give the target's column the type of a newly created table, or remove"
                " the row that conflicts, then start again.",
                f"the target table of {label} cannot hold a value",
            )

    def _insert(self, table: str, fields: Sequence[Field], columns: Sequence[pa.Array], count: int, label: str) -> None:
        cells = [pc.fill_null(_literal(column, f.kind), "NULL") for column, f in zip(columns, fields, strict=True)]
        tuples = join_texts(*cells, between=",")
        head = f"INSERT INTO {table} ({', '.join(quoted(field.name) for field in fields)}) VALUES ("
        room = min(self._packet, _LOAD_BYTES) - len(head.encode()) - 16
        for first, last in _runs(pc.binary_length(tuples).to_numpy(zero_copy_only=False) + 3, room):
            self._session.run(head + "),(".join(tuples.slice(first, last - first).to_pylist()) + ")")


def constant(field: Field, text: str, label: str) -> str:
    """Return a value as SQL.

    :raises LimitExceeded: when MySQL cannot hold it.
    """
    loaded = _loaded(field, pa.array([text], _Texts), label, _LOAD_BYTES)
    return str(_literal(loaded, field.kind)[0].as_py())


def _loaded(field: Field, column: pa.Array, label: str, packet: int) -> pa.Array:
    """Return the texts to load for a column, after checking that MySQL can hold all of them."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    texts = column.cast(_Texts)
    kind = field.kind
    if kind.takes is not None:
        taken = pc.match_substring_regex(texts, f"^(?:{kind.takes})$")
        _refuse(texts, pc.invert(taken), field, label, f"which {kind.sql} does not have")
    if kind.longest:
        length = pc.utf8_length(texts)
        if kind.hexadecimal:
            length = pc.divide(pc.subtract(length, 2), 2)
        _refuse(texts, pc.greater(length, kind.longest), field, label, f"longer than {kind.longest} in a key")
    # A row with such a value could not be read again, and functions return NULL for it.
    large = pc.greater(pc.binary_length(texts), packet - 1024)
    _refuse(texts, large, field, label, f"larger than max_allowed_packet ({packet} bytes)")
    return kind.encode(texts)


def _refuse(texts: pa.Array, wrong: pa.Array, field: Field, label: str, why: str) -> None:
    if not pc.any(wrong).as_py():
        return
    value = texts.filter(wrong)[0].as_py()
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}… ({len(value)} characters)"
    raise LimitExceeded(
        f"column {field.title or field.name!r} of {label} has the value {shown!r}, {why}",
        "Nothing of the unit was applied, and a retry does not help. Change the value at the source, or leave the"
        " column out with `columns` in the pipeline file. If the log already contains the change, then run `airflow-cdc"
        " resnapshot --all`, which continues without it.",
        f"column {field.title or field.name!r} of {label} has a value {why}",
    )


def _cell(texts: pa.Array, kind: MysqlColumnType) -> pa.Array:
    """Return a value as a field of a line; null becomes NULL."""
    if kind.plain:
        return texts
    doubled = pc.replace_substring(texts, '"', '""')
    return join_texts('"', doubled, '"')


def _literal(texts: pa.Array, kind: MysqlColumnType) -> pa.Array:
    """Return a value as SQL; null becomes NULL.

    :param texts: texts checked by :func:`_loaded`; exact numbers consist of digits, a sign and a point.
    """
    if kind.exact:
        return texts
    if kind.hexadecimal:
        return join_texts("X'", texts, "'")
    escaped = texts if kind.plain else pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), "'", "''")
    return join_texts("'", escaped, "'")


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts of some megabytes; none for an empty batch."""
    if not batch.num_rows:
        return
    rows = max(1, int(batch.num_rows * _LOAD_BYTES / max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _runs(sizes: np.ndarray[tuple[int], np.dtype[np.int64]], room: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with a total size of at most ``room``; a larger row forms its own range."""
    first, total = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if total + size > room and row > first:
            yield first, row
            first, total = row, 0
        total += size
    yield first, len(sizes)


def _bytes(lines: pa.Array) -> memoryview:
    """Return the bytes of all texts, one after the other."""
    _, offsets, data = lines.cast(_Texts).buffers()
    ends = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return memoryview(data)[ends[0] : ends[-1]]
