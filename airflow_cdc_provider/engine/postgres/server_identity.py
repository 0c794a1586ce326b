"""The server that the gate has let pass, asked of every further connection that data comes from.

A name can lead elsewhere from one connection to the next: a virtual address moves, a list of hosts is tried in order.
Slots, tables and positions of the same names on another server would be taken for ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.postgres.connection import describe

QUERY = (
    "(SELECT system_identifier::text FROM pg_control_system()), CASE WHEN pg_is_in_recovery() THEN 0 ELSE"
    " ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END,"
    " (SELECT oid::bigint FROM pg_database WHERE datname = current_database())"
)
"""Expressions of a SELECT that tell a server's origin, for :meth:`Origin.require`."""


@dataclass(frozen=True)
class Origin:
    """Where a pipeline's data comes from.

    :param system: ``system_identifier`` of the cluster.
    :param timeline: timeline of the primary's log; 0 on a standby.
    :param database: oid of the database.
    """

    system: str
    timeline: int
    database: int

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Origin:
        """The origin that stands in a commit record's ``identity``: by the names of :class:`.SlotIdentity`'s fields."""
        return cls(str(identity["system"]), int(identity["timeline"]), int(identity["database"]))

    def require(self, found: Sequence[Any], dsn: str) -> None:
        """Refuse a connection that leads to another origin.

        :param found: what :data:`QUERY` returned, as values or as texts.
        :raises StreamFailed: naming both. Whether the pipeline can go on there is for the gate to say, through which
            the next attempt begins.
        """
        system, timeline, database = found
        there = Origin(str(system), int(timeline), int(database))
        if there != self:
            raise StreamFailed(
                f"{describe(dsn)} leads to another server than a moment ago: to {there}, not {self}",
                "Start again: whether the pipeline can go on there is checked first. If it should not, let"
                " `source.dsn` lead to one server, the primary.",
            )

    def __str__(self) -> str:
        place = f"timeline {self.timeline}" if self.timeline else "a standby"
        return f"system {self.system}, {place}, database {self.database}"
