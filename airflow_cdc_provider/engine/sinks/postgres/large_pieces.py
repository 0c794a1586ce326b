"""Pieces of the log that are too large to pass through Spark's JVM, kept in the sink between the reader and a task.

Whoever stages has to reach the sink anyway, so nothing else has to be reached, granted or encrypted. A deposit is an
unlogged table of fragments, written whole or not at all, and empty after a crash of the server, which its size tells.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_stream

_FRAGMENT_BYTES = 1 << 20

# The binary format of COPY: a signature with flags and the length of an extension, and what stands in place of a row.
_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_TRAILER = struct.pack(">h", -1)


def write_deposit(connection: Connection, table: sql.Composable, data: bytes | bytearray) -> None:
    """Create a table of the fragments of ``data``.

    :param table: its quoted name.
    """
    rows(
        connection,
        sql.SQL(
            "CREATE UNLOGGED TABLE {table} (number bigint, fragment bytea) WITH (autovacuum_enabled = off);"
            # It is read once: to compress it would take longer than to write it.
            "ALTER TABLE {table} ALTER COLUMN fragment SET STORAGE EXTERNAL"
        ).format(table=table),
    )
    copy_stream(connection, sql.SQL("COPY {} FROM STDIN (FORMAT binary)").format(table), _encoded(data))


def _encoded(data: bytes | bytearray) -> Iterator[bytes]:
    yield _HEADER
    whole = memoryview(data)
    for number, at in enumerate(range(0, len(whole), _FRAGMENT_BYTES)):
        fragment = whole[at : at + _FRAGMENT_BYTES]
        yield b"".join([struct.pack(">hiqi", 2, 8, number, len(fragment)), fragment])
    yield _TRAILER


def read_deposit(connection: Connection, table: sql.Composable, size: int) -> bytearray:
    """Put the fragments of a deposit together again.

    :param size: bytes that were deposited.
    :returns: what is there of it.
    """
    data, end = bytearray(size), 0
    exists = scalar(connection, "SELECT to_regclass(%s)", [table.as_string(connection)]) is not None
    if exists:
        with connection.cursor("fragments") as cursor:
            cursor.itersize = 4
            cursor.execute(sql.SQL("SELECT fragment FROM {} ORDER BY number").format(table))
            for (fragment,) in cursor:
                data[end : end + len(fragment)] = fragment
                end += len(fragment)
    del data[end:]
    return data
