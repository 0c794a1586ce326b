"""The identity of the server that passed the gate; every further connection that data comes from is checked against it.

A name can lead to another server from one connection to the next: a virtual address moves, or a list of hosts is tried
in order. Slots, tables and positions of the same names on the other server would be mistaken for those of the pipeline.
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
"""SELECT expressions that return a server's origin, for :meth:`ServerIdentity.require`."""


@dataclass(frozen=True)
class ServerIdentity:
    """The cluster, timeline and database that a pipeline's data comes from.

    :param system: ``system_identifier`` of the cluster.
    :param timeline: timeline of the primary's log; 0 on a standby.
    :param database: oid of the database.
    """

    system: str
    timeline: int
    database: int

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> ServerIdentity:
        """Read the origin from a commit record's ``identity``, which has the field names of :class:`.SlotIdentity`."""
        return cls(str(identity["system"]), int(identity["timeline"]), int(identity["database"]))

    def require(self, found: Sequence[Any], dsn: str) -> None:
        """Refuse a connection that leads to another origin.

        :param found: the result of :data:`QUERY`, as values or as texts.
        :raises StreamFailed: if the origins differ; names both. The next attempt starts with the gate, which decides
            whether the pipeline can continue there.
        """
        system, timeline, database = found
        there = ServerIdentity(str(system), int(timeline), int(database))
        if there != self:
            raise StreamFailed(
                f"{describe(dsn)} leads to another server than before: to {there}, not {self}",
                "Start the pipeline again; it first checks whether it can continue on that server. If it should not,"
                " change `source.dsn` so that it always leads to the primary.",
            )

    def __str__(self) -> str:
        place = f"timeline {self.timeline}" if self.timeline else "a standby"
        return f"system {self.system}, {place}, database {self.database}"
