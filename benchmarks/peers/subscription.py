"""Postgres's own logical replication into the same target as the mirror: ``CREATE SUBSCRIPTION``.

It has the default settings: an apply worker that does not wait until its commits are flushed (``synchronous_commit =
off``), and transactions that are sent after their commit.
"""

from __future__ import annotations

import time
from functools import partial

import psycopg

from airflow_cdc_provider.engine.core.waiting import await_condition
from benchmarks.backlog import PUBLICATION, Backlog, walsender_start
from benchmarks.lab import create_database, drop_database, execute, query
from benchmarks.report import WrongResult

SUBSCRIPTION = "subscription"
_SECONDS = 3600.0
_INTERVAL = 0.02


def drain(backlog: Backlog, name: str) -> float:
    """Apply a backlog and return the seconds from the start of its walsender until the last change is visible.

    :param name: name of the database at the target, and of the subscription.
    """
    lab, shape = backlog.lab, backlog.shape
    create_database(lab.target, name)
    target = lab.target.dsn(name)
    execute(target, *shape.ddl, *shape.fill(backlog.half, backlog.steps))
    lab.settle()
    table, key = backlog.last
    changed = f"SELECT {shape.row.touched} FROM public.{table} WHERE id = {key}"
    end = query(backlog.dsn, changed)
    with backlog.slot() as slot:
        options = f"create_slot = false, copy_data = false, slot_name = '{slot}'"
        publication = f"CONNECTION '{backlog.dsn}' PUBLICATION {PUBLICATION}"
        execute(target, f"CREATE SUBSCRIPTION {name} {publication} WITH ({options})")
        try:
            with psycopg.connect(target, autocommit=True) as looking:
                found = partial(looking.execute, changed.encode())
                if not await_condition(lambda: found().fetchone() == end, _SECONDS, _INTERVAL):
                    raise WrongResult(f"{SUBSCRIPTION}: no end within {_SECONDS:.0f} s")
            seconds = time.time() - walsender_start(backlog.dsn, slot)
        finally:
            disabled, apart = f"ALTER SUBSCRIPTION {name} DISABLE", f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)"
            execute(target, disabled, apart, f"DROP SUBSCRIPTION {name}")
    lab.check_equal(backlog.database, name, f"{SUBSCRIPTION}: rows and checksum", shape.names)
    drop_database(lab.target, name)
    return seconds
