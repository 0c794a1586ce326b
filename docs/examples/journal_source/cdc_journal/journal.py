"""The table that is read: how it is defined, and its rows beyond a number."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, GateClosed
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.table import Column, Table
from cdc_journal.settings import JournalSettings

_BIGINT, _TEXT = ("bigint", 20), ("text", 25)


class Journal:
    """A table whose rows stay as they are, with a primary key of one integer above 0 that grows with each row."""

    def __init__(self, settings: JournalSettings) -> None:
        self._path = settings.path
        self._name = settings.table

    def table(self) -> Table:
        """The table as sinks know tables: the key is a ``bigint``, all else is text.

        :raises ConfigError: when it cannot be read as a journal.
        """
        with self._connected() as connection:
            found = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", [self._name]).fetchall()
        keys = [(name, type_) for name, type_, pk in found if pk]
        if len(keys) != 1 or keys[0][1].upper() != "INTEGER":
            raise ConfigError(
                f"source.table: {self._path} has no table {self._name} with an INTEGER PRIMARY KEY",
                "Name a table whose rows are numbered so.",
            )
        columns = tuple(
            Column(name, *(_BIGINT if pk else _TEXT), None, bool(pk), True, attnum=number)
            for number, (name, _, pk) in enumerate(found, 1)
        )
        return Table(1, "main", self._name, columns, (keys[0][0],), "d", None, (), "r")

    def last(self, table: Table) -> LogPosition:
        """The number of the last row, 0 when there is none."""
        with self._connected() as connection:
            found = connection.execute(f"SELECT max({_quoted(table.key[0])}) FROM {_quoted(self._name)}").fetchone()
        return LogPosition(int(found[0] or 0))

    def rows(self, table: Table, after: LogPosition, upto: LogPosition, limit: int) -> pa.Table:
        """The next rows as texts, by the names ``c0``, …, in the order of their numbers.

        :param after: number of the last row that is known.
        :param upto: number beyond which nothing is read.
        """
        # With the table in front: SQLite takes a quoted name that it does not find for a text.
        texts = ", ".join(f"CAST(t.{_quoted(column.name)} AS TEXT)" for column in table.columns)
        key = f"t.{_quoted(table.key[0])}"
        query = f"SELECT {texts} FROM {_quoted(self._name)} t WHERE {key} > ? AND {key} <= ? ORDER BY {key} LIMIT ?"
        with self._connected() as connection:
            found = connection.execute(query, [after, upto, limit]).fetchall()
        columns = zip(*found, strict=True) if found else [()] * len(table.columns)
        return pa.table({f"c{i}": pa.array(column, pa.string()) for i, column in enumerate(columns)})

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that only reads.

        :raises ConnectionFailed: when the file cannot be read.
        :raises GateClosed: when the table is defined otherwise than it was.
        """
        connection = None
        try:
            connection = sqlite3.connect(f"{Path(self._path).as_uri()}?mode=ro", uri=True)
            yield connection
        except sqlite3.Error as e:
            if getattr(e, "sqlite_errorname", "SQLITE_ERROR") == "SQLITE_ERROR":  # a query that does not fit the table
                raise GateClosed(
                    f"{self._name} in {self._path} is not what it was, or has a text that is none: {e}",
                    "Restore the table. Without that: `airflow-cdc drop`, drop the target table, then `run`.",
                ) from e
            raise ConnectionFailed(f"{self._path} cannot be read: {e}", "Look at the file, then start again.") from e
        finally:
            if connection is not None:
                connection.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
