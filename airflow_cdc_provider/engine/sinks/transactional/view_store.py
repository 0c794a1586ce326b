"""The versions of a pipeline's views in a store with transactions: which there are, and the steps that build them.

A step is one transaction that holds the epoch like a unit does, so no unit is applied meanwhile. A step that a crash
interrupts has done nothing. Until a version is built completely, readers keep seeing the former one, which still moves
with the mirror unless a change of a table has made that impossible.
"""

from __future__ import annotations

from abc import abstractmethod

from airflow_cdc_provider.engine.sinks.view_definitions import ViewDefinitions
from airflow_cdc_provider.engine.views.version import ViewVersion


class TooSlow(Exception):
    """A portion takes longer than a unit can wait for; nothing was done."""


class ViewStore(ViewDefinitions):
    """The versions of views, in a transaction."""

    @abstractmethod
    def is_consistent(self) -> bool:
        """Return whether the mirror is in a state that the source once had."""

    @abstractmethod
    def begin(self, version: ViewVersion) -> None:
        """Create the table of a version's rows, and its queue."""

    @abstractmethod
    def build(self, version: ViewVersion, count: int) -> None:
        """Build the next range of anchors, of about ``count`` rows of the root; the last one completes the version.

        :raises TooSlow: when it takes too long, unless ``count`` is 1.
        """

    @abstractmethod
    def exchange(self, version: ViewVersion) -> None:
        """Give a complete version's table the view's name, and remove the former versions.

        :raises Blocked: when readers keep the former table locked.
        """

    @abstractmethod
    def drain(self, version: ViewVersion, count: int) -> bool:
        """Recompute about ``count`` queued anchors; return whether some are left.

        :raises TooSlow: as :meth:`build`.
        """
