"""Keeps pieces of the log that are too large for Spark's JVM in the sink, between the reader and a task.

A staging task must reach the sink anyway, so no other service has to be reachable, authorized or encrypted. A deposit
is an unlogged table of fragments, written completely or not at all. After a crash of the server it is empty, which its
size reveals.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from psycopg2 import sql

from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_stream

_FRAGMENT_BYTES = 1 << 20

# The binary format of COPY: a signature with flags and the length of an extension, and the marker after the last row.
_HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_TRAILER = struct.pack(">h", -1)


def write_deposit(connection: Connection, table: sql.Composable, data: bytes | bytearray) -> None:
    """Create a table with the fragments of ``data``.

    :param table: its quoted name.
    """
    rows(
        connection,
        sql.SQL(
            "CREATE UNLOGGED TABLE {table} (number bigint, fragment bytea) WITH (autovacuum_enabled = off);"
            # It is read once; compressing it would take longer than writing it.
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
    """Return the data of a deposit, put together from its fragments.

    :param size: number of deposited bytes.
    :returns: the existing bytes.
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
