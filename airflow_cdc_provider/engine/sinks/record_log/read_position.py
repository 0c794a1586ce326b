"""Where rows that were read from the source stand in a changelog: behind all that was read at the same LSN before."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ


@dataclass(frozen=True)
class Room:
    """A place for rows.

    :param lsn: the applied LSN.
    :param seq: of the rows.
    :param marker: ``_seq`` of the rows that say that they are read again; ``None`` when there is nothing to replace.
    """

    lsn: LogPosition
    seq: int
    marker: int | None


def room_at(lsn: LogPosition, last: int | None, replacing: bool) -> Room:
    """Where rows that are read now stand.

    :param lsn: the applied LSN.
    :param last: the highest ``_seq`` of the rows that have been read at that LSN; ``None`` without any.
    :param replacing: they replace what the changelog amounts to, which has rows.
    """
    if not replacing:
        return Room(lsn, FIRST_READ, None)
    marker = FIRST_READ if last is None else last + 1
    return Room(lsn, marker + 1, marker)
