"""A context for checks that query Postgres: names the holders of a lock, and converts errors of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2

from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.postgres.lock_holders import naming_holders


@contextmanager
def convert_driver_errors(check: str) -> Iterator[None]:
    """Convert errors of the driver during a check; see ``around`` of :class:`.Checks`.

    :raises Blocked: if a lock was not granted in time; names its holders.
    :raises ConnectionFailed: for any other error of the driver.
    """
    try:
        with naming_holders():
            yield
    except psycopg2.Error as e:
        raise ConnectionFailed(f"the check {check} failed: {str(e).strip()}", "Check the server's log.") from e
