"""Timelines: determines whether a promoted standby continues the log that a position was taken from.

Every promotion, and every recovery to a point in time, begins a new timeline. Up to the switch, its log is the same as
that of the old timeline. After the switch, the old primary may have written changes that no longer exist anywhere. The
history file of a timeline lists the position at which it left each of its ancestors. A role with REPLICATION may read
that file over the replication protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import pq

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.lsn import Lsn, parse_lsn
from airflow_cdc_provider.engine.postgres.connection import describe
from airflow_cdc_provider.engine.postgres.replication import execute, open_replication


@dataclass(frozen=True)
class Switch:
    """The end of an ancestor: the descendant shares its log up to ``lsn``."""

    timeline: int
    lsn: Lsn


def parse_history(text: str) -> tuple[Switch, ...]:
    """Parse a timeline history file, which has a line for each ancestor: its number, the switch's LSN and a reason.

    :raises ValueError: if a line does not have that form.
    """
    lines = (line.partition("#")[0].split(None, 2) for line in text.splitlines())
    return tuple(Switch(int(fields[0]), parse_lsn(fields[1])) for fields in lines if fields)


def left_at(history: tuple[Switch, ...], timeline: int) -> Lsn | None:
    """Return the position at which the log left ``timeline``, or ``None`` if that is not an ancestor."""
    return next((switch.lsn for switch in history if switch.timeline == timeline), None)


def read_history(dsn: str, timeline: int) -> tuple[Switch, ...]:
    """Ask a server for the ancestors of its timeline.

    :raises ConnectionFailed: if no replication connection can be opened.
    :raises StreamFailed: if the server does not have that history, or does not answer.
    """
    connection = open_replication(dsn, "airflow-cdc timeline")
    try:
        result = execute(connection, f"TIMELINE_HISTORY {timeline}")
        if result is None or result.status != pq.ExecStatus.TUPLES_OK:
            message = connection.error_message.decode(errors="replace").strip()
            raise StreamFailed(
                f"{describe(dsn)} does not return the history of timeline {timeline}: {message}",
                "If the history is lost, run `airflow-cdc resnapshot --all`; otherwise check the server's log.",
            )
        return parse_history((result.get_value(0, 1) or b"").decode(errors="replace"))
    finally:
        connection.finish()
