"""Commits that wait for a nonexistent synchronous standby: they are in the log, but not visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.postgres import PostgresServer
from tests.support.databases import execute, query_rows
from tests.support.patience import SECONDS

WITHOUT_STANDBY = {"synchronous_standby_names": "nobody", "synchronous_commit": "local"}
"""Settings of such a server; sessions that request it wait for the standby."""


@contextmanager
def commits_that_wait(server: PostgresServer, *statements: str) -> Iterator[Callable[[], None]]:
    """Start sessions whose commits wait for the standby, one per statement, and yield a function that releases them."""

    def commit(statement: str) -> None:
        with psycopg.connect(server.dsn(), options="-c synchronous_commit=on") as connection:
            connection.execute(statement.encode())

    def release() -> None:
        execute(server.dsn(), "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
        for future in waiting:
            future.result(SECONDS)

    with ThreadPoolExecutor(len(statements)) as pool:
        waiting = [pool.submit(commit, statement) for statement in statements]
        try:
            query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            assert await_condition(lambda: query_rows(server.dsn(), query) == [(len(statements),)], SECONDS)
            yield release
        finally:
            release()
