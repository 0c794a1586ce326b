"""The database file: one writer at a time, and SQLite's errors as those of the engine.

SQLite knows no sessions that could be ended and no locks of rows: a transaction that will write takes the whole file
when it begins. Such transactions are short, since what takes long is done before them: reading, staging, waiting.
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
"""How long a transaction waits for another one to end."""


def quoted(name: str) -> str:
    """A name as SQL."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str], prefix: str = "") -> str:
    """Names as SQL, in parentheses: a list of columns, or a row of their values."""
    return "(" + ", ".join(prefix + quoted(name) for name in names) + ")"


def marks(count: int) -> str:
    """A row of parameters."""
    return "(" + ", ".join("?" * count) + ")"


@contextmanager
def connected(path: str) -> Iterator[sqlite3.Connection]:
    """A connection in which a transaction begins only where one is begun.

    :raises CdcError: in place of SQLite's errors.
    """
    connection = None
    try:
        # Rows that are compared are read in one thread, and their reading may be ended in another.
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # what is committed survives a crash of the machine
        yield connection
    except sqlite3.IntegrityError as e:
        raise TargetConflict(
            f"a table in {path} refuses a change of the source: {e}",
            "Drop the constraint, index or trigger that somebody has added to the target table, then start again.",
        ) from e
    except sqlite3.DataError as e:
        raise ValueRefused(
            f"{path} cannot hold a value of the source: {e}",
            "Shorten the value, or leave its column out by `columns` in the pipeline file.",
        ) from e
    except sqlite3.Error as e:
        name = getattr(e, "sqlite_errorname", "")
        if name.startswith("SQLITE_BUSY"):
            raise Blocked(
                f"another process has been writing to {path} for {WAIT_SECONDS:g} seconds",
                "Look which one (fuser), let it end or end it, then start again.",
            ) from e
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_READONLY")):
            raise ConnectionFailed(
                f"{path} cannot be opened or written: {e}", "Look at the file, then start again."
            ) from e
        raise StreamFailed(
            f"{path}: {e}", "Look if the disk is full. Start again: what has been committed stays."
        ) from e
    finally:
        if connection is not None:
            connection.close()  # a transaction that is open is rolled back
