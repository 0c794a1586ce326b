"""What surrounds a check that asks Postgres: it names who holds a lock that is waited for, and tells driver errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg2

from airflow_cdc_provider.engine.core.errors import ConnectionFailed
from airflow_cdc_provider.engine.postgres.lock_holders import naming_holders


@contextmanager
def driver_errors_told(check: str) -> Iterator[None]:
    """See :class:`.Checks`.

    :raises Blocked: naming who holds the lock that was waited for.
    :raises ConnectionFailed: for whatever else the driver raises.
    """
    try:
        with naming_holders():
            yield
    except psycopg2.Error as e:
        raise ConnectionFailed(f"the check {check} failed: {str(e).strip()}", "Look into the server's log.") from e
