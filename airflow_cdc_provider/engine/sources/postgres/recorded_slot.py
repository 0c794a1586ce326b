"""The source in Postgres as a commit record describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from airflow_cdc_provider.engine.core.lsn import LOG_START, Lsn, format_lsn, parse_lsn
from airflow_cdc_provider.engine.core.record import noted_by
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import SlotIdentity

_PUBLISHED = "published:"


@dataclass(frozen=True)
class RecordedSlot:
    """The slot from which the sinks are filled, as it was created, with what was recorded about it since.

    :param slot_identity: its timeline is the one on which the slot was seen last.
    :param created_publication: whether the publication was created with the slot, and is dropped with it.
    :param seen: the highest ``restart_lsn`` that was seen on that timeline.
    :param published: the entries of the catalog that publish each leaf, see :func:`.published_entries`.
    """

    slot_identity: SlotIdentity
    created_publication: bool
    seen: Lsn = LOG_START
    published: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> RecordedSlot:
        """Read it from a record's ``identity``, or that of its copy.

        :raises ConfigError: when it is that of another kind of source.
        """
        noted = noted_by("postgres", identity)
        return cls(
            SlotIdentity(**{each.name: noted[each.name] for each in fields(SlotIdentity)}),
            noted["created_publication"],
            parse_lsn(noted["slot_seen"]),
            {int(name.removeprefix(_PUBLISHED)): noted[name] for name in noted if name.startswith(_PUBLISHED)},
        )

    @property
    def origin(self) -> ServerIdentity:
        """Return the server from which rows have to be read."""
        return ServerIdentity(self.slot_identity.system, self.slot_identity.timeline, self.slot_identity.database)

    def to_notes(self) -> dict[str, Any]:
        """Return the values that the record has about the slot."""
        made = {**asdict(self.slot_identity), "created_publication": self.created_publication}
        return {**made, **noted_seen(self.seen), **noted_published(self.published)}


def noted_timeline(timeline: int) -> dict[str, Any]:
    """Return the record's value for the timeline on which the slot is seen."""
    return {"timeline": timeline}


def noted_seen(restart_lsn: Lsn) -> dict[str, Any]:
    """Return the record's value for the ``restart_lsn`` at which the slot was seen."""
    return {"slot_seen": format_lsn(restart_lsn)}


def noted_published(published: Mapping[int, str]) -> dict[str, Any]:
    """Return the record's values for the catalog entries that publish leaves."""
    return {f"{_PUBLISHED}{oid}": entries for oid, entries in published.items()}
