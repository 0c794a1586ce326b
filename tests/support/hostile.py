"""An environment that tells libpq to alter values: all that the tests run has to bear it, but their own connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

ENVIRONMENT = {
    "PGCLIENTENCODING": "LATIN1",
    "PGTZ": "Asia/Kolkata",
    "PGDATESTYLE": "German, DMY",
    "PGOPTIONS": "-c IntervalStyle=sql_standard -c extra_float_digits=0 -c bytea_output=escape"
    " -c standard_conforming_strings=off",
}

_connect = psycopg.connect


@contextmanager
def connected_plainly(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """A session without this environment, which has what its role and database set."""
    with monkeypatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name)
        connection = _connect(dsn, autocommit=True)
    with connection:
        yield connection


def connect_unharmed(conninfo: str = "", **arguments: Any) -> psycopg.Connection[Any]:
    """``psycopg.connect``, which only tests use and nothing that they test, as if the environment were empty."""
    given = {"client_encoding": "UTF8", "options": ""} | conninfo_to_dict(conninfo) | arguments
    connection = _connect(**given)
    connection.pgconn.exec_(b"SET TimeZone = 'UTC'; SET DateStyle = 'ISO, MDY'")
    return connection
