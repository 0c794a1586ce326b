"""Reads the definition of the table, and its rows after a given number."""

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
    """An append-only table; its primary key is one positive integer that grows with each row."""

    def __init__(self, settings: JournalSettings) -> None:
        self._path = settings.path
        self._name = settings.table

    def table(self) -> Table:
        """Describe the table as sinks expect it: the key is a ``bigint``, other columns are ``text``.

        :raises ConfigError: if it does not exist, or has no key of one integer.
        """
        with self._connected() as connection:
            found = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", [self._name]).fetchall()
        keys = [(name, type_) for name, type_, pk in found if pk]
        if len(keys) != 1 or keys[0][1].upper() != "INTEGER":
            raise ConfigError(
                f"source.table: {self._path} has no table {self._name} with an INTEGER PRIMARY KEY",
                "Set `source.table` to a table with such a key.",
            )
        columns = tuple(
            Column(name, *(_BIGINT if pk else _TEXT), None, bool(pk), True, attnum=number)
            for number, (name, _, pk) in enumerate(found, 1)
        )
        return Table(1, "main", self._name, columns, (keys[0][0],), "d", None, (), "r")

    def last(self, table: Table) -> LogPosition:
        """Return the number of the last row; 0 if there is none."""
        with self._connected() as connection:
            found = connection.execute(f"SELECT max({_quoted(table.key[0])}) FROM {_quoted(self._name)}").fetchone()
        return LogPosition(int(found[0] or 0))

    def rows(self, table: Table, after: LogPosition, upto: LogPosition, limit: int) -> pa.Table:
        """Return the next rows in the order of their numbers, as text columns ``c0``, ….

        :param after: number of the last row already read.
        :param upto: number of the last row to read.
        :param limit: maximum number of rows.
        """
        # Qualify names, because SQLite treats an unknown quoted name as a string.
        texts = ", ".join(f"CAST(t.{_quoted(column.name)} AS TEXT)" for column in table.columns)
        key = f"t.{_quoted(table.key[0])}"
        query = f"SELECT {texts} FROM {_quoted(self._name)} t WHERE {key} > ? AND {key} <= ? ORDER BY {key} LIMIT ?"
        with self._connected() as connection:
            found = connection.execute(query, [after, upto, limit]).fetchall()
        columns = zip(*found, strict=True) if found else [()] * len(table.columns)
        return pa.table({f"c{i}": pa.array(column, pa.string()) for i, column in enumerate(columns)})

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection, and close it at the end.

        :raises ConnectionFailed: if the file cannot be read.
        :raises GateClosed: if the definition of the table has changed.
        """
        connection = None
        try:
            connection = sqlite3.connect(f"{Path(self._path).as_uri()}?mode=ro", uri=True)
            yield connection
        except sqlite3.Error as e:
            if getattr(e, "sqlite_errorname", "SQLITE_ERROR") == "SQLITE_ERROR":  # the query does not match the table
                raise GateClosed(
                    f"{self._name} in {self._path} has changed, or has a text that is not valid UTF-8: {e}",
                    "Restore the table. If you cannot, run `airflow-cdc drop`, drop the target table, then `run`.",
                ) from e
            raise ConnectionFailed(f"{self._path} cannot be read: {e}", "Check the file, then start again.") from e
        finally:
            if connection is not None:
                connection.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
