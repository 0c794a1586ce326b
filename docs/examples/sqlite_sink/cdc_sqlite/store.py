"""Opens the database file, and converts SQLite's errors into those of the engine.

SQLite has neither sessions that could be ended nor row locks: a writing transaction locks the whole file when it
begins. Such transactions are short, because the slow work (reading, staging, waiting) is done before them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from airflow_cdc_provider.engine.core.errors import (
    Blocked,
    ConnectionFailed,
    StreamFailed,
    TargetConflict,
    ValueRefused,
)

WAIT_SECONDS = 60.0
"""Seconds that a transaction waits for another one to end."""


def quoted(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str], prefix: str = "") -> str:
    """Quote names and put them in parentheses, as a column list or as a row of their values."""
    return "(" + ", ".join(prefix + quoted(name) for name in names) + ")"


def marks(count: int) -> str:
    """Return a row of ``count`` parameter marks."""
    return "(" + ", ".join("?" * count) + ")"


@contextmanager
def connected(path: str) -> Iterator[sqlite3.Connection]:
    """Open a connection in which transactions begin only by ``BEGIN``, and close it at the end.

    :raises CdcError: instead of SQLite's errors.
    """
    connection = None
    try:
        # A comparison reads rows in one thread, and may end the read in another.
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # commits survive a crash of the machine
        yield connection
    except sqlite3.IntegrityError as e:
        raise TargetConflict(
            f"a table in {path} refuses a change of the source: {e}",
            "Drop the constraint, index or trigger that was added to the target table, then start again.",
        ) from e
    except sqlite3.DataError as e:
        raise ValueRefused(
            f"{path} cannot hold a value of the source: {e}",
            "Shorten the value, or exclude its column with `columns` in the pipeline file.",
        ) from e
    except sqlite3.Error as e:
        name = getattr(e, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            raise Blocked(
                f"another process has been writing to {path} for {WAIT_SECONDS:g} seconds",
                "Find it with `fuser`, wait for it or end it, then start again.",
            ) from e
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY")):
            raise ConnectionFailed(
                f"{path} cannot be opened or written: {e}", "Check the file and its permissions, then start again."
            ) from e
        raise StreamFailed(
            f"{path}: {e}", "Check whether the disk is full, then start again; committed data is kept."
        ) from e
    finally:
        if connection is not None:
            connection.close()  # rolls back an open transaction
