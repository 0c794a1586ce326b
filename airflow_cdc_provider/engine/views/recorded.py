"""The views in the commit record of a sink at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.views.version import ViewVersion


@dataclass(frozen=True)
class RecordedViews:
    """The views in the commit record of a sink, as of one snapshot.

    :param applied: the applied position.
    :param versions: the versions in the order of their numbers.
    :param queued: number of entries in the queue, by number of the version.
    """

    applied: LogPosition
    versions: Sequence[ViewVersion]
    queued: Mapping[int, int]
