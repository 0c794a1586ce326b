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


def compared_version(versions: Sequence[ViewVersion], label: str) -> ViewVersion | None:
    """Return the version of a view that can be compared: the one that readers see if it moves, or the newest."""
    kept = [version for version in versions if version.view.label == label and version.kept]
    return next((version for version in kept if version.in_place), kept[-1] if kept else None)
