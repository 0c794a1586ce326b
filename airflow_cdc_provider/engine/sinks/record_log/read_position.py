"""Determines the position of rows read from the source in a changelog: after earlier reads at the same LSN."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import FIRST_READ


@dataclass(frozen=True)
class ReadPosition:
    """A position for rows.

    :param lsn: the applied LSN.
    :param seq: ``_seq`` of the rows.
    :param marker: ``_seq`` of the events that announce the re-read; ``None`` if there is nothing to replace.
    """

    lsn: LogPosition
    seq: int
    marker: int | None


def read_position(lsn: LogPosition, last: int | None, replacing: bool) -> ReadPosition:
    """Return the position for rows that are read now.

    :param lsn: the applied LSN.
    :param last: the highest ``_seq`` of rows read at that LSN before; ``None`` if there are none.
    :param replacing: the rows replace those of the changelog, which has some.
    """
    if not replacing:
        return ReadPosition(lsn, FIRST_READ, None)
    marker = FIRST_READ if last is None else last + 1
    return ReadPosition(lsn, marker + 1, marker)
