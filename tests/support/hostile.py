"""An environment that makes libpq alter values; all code under test must tolerate it, except the tests' connections."""

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
    """Open a session without this environment, with the settings of its role and database."""
    with monkeypatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name)
        connection = _connect(dsn, autocommit=True)
    with connection:
        yield connection


def connect_unharmed(conninfo: str = "", **arguments: Any) -> psycopg.Connection[Any]:
    """Connect like ``psycopg.connect`` with an empty environment; only tests use this, and no code under test."""
    given = {"client_encoding": "UTF8", "options": ""} | conninfo_to_dict(conninfo) | arguments
    connection = _connect(**given)
    connection.pgconn.exec_(b"SET TimeZone = 'UTC'; SET DateStyle = 'ISO, MDY'")
    return connection
