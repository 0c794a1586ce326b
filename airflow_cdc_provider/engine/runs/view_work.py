"""Builds and drains the views of a run's sinks in a thread, between the units that the stream applies.

The thread also gives the run the states of the views, which its heartbeats carry to Airflow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.view_states import view_states
from airflow_cdc_provider.engine.sinks.contract import KeepsViews, ViewKeeper

_IDLE_SECONDS = 0.5
_REPORT_SECONDS = 5.0
_END_SECONDS = 5.0


class ViewWork:
    """The work on the views of all sinks; see :func:`keeping_views`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._keepers: list[ViewKeeper] = [
            branch.sink.view_keeper(run.epoch)
            for branch in run.branches
            if isinstance(branch.sink, KeepsViews) and branch.sink.keeps_views()
        ]
        self._ending = threading.Event()
        self._finishing: LogPosition | None = None
        self._finished = threading.Event()
        self._error: Exception | None = None
        self._reported = float("-inf")

    def check(self) -> None:
        """Raise the error that has ended the work, if there is one."""
        if self._error is not None:
            raise self._error

    def finish(self, target: LogPosition) -> bool:
        """Return whether all views are built and have all changes up to a position; work towards that."""
        if not self._keepers:
            return True
        self._finishing = target
        self.check()
        return self._finished.is_set()

    @property
    def waiting(self) -> str | None:
        """Return what an end that is asked for waits for; ``None`` if it does not wait for views."""
        if self._finishing is None or self._finished.is_set():
            return None
        late = [each for each in self._run.views if each["state"] != "up-to-date"]
        shown = ", ".join(f"{each['view']} ({each['state']}, {each['built_percent']:g} % built)" for each in late)
        return f"views to be up to date: {shown}" if shown else None

    def work(self) -> None:
        """Work until the end is asked for; runs in a thread."""
        try:
            while not self._ending.is_set():
                target = self._finishing
                busy = [keeper.step(everything=target is not None) for keeper in self._keepers]
                if target is not None and all(keeper.reached(target) for keeper in self._keepers):
                    self._finished.set()
                if time.monotonic() - self._reported >= _REPORT_SECONDS:
                    self._report()
                if not any(busy):
                    self._ending.wait(_IDLE_SECONDS)
        except Exception as e:  # raised by check(), in the thread that watches the stream
            self._error = e

    def _report(self) -> None:
        """Give the run the states of the views; if a sink cannot be asked, the former ones stay."""
        with suppress(CdcError, *DRIVER_ERRORS):
            self._run.views = view_states(self._run.pipeline)
        self._reported = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work during the block."""
        if not self._keepers:
            yield
            return
        for keeper in self._keepers:
            keeper.reconcile()
        thread = threading.Thread(target=self.work, name="views", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(_END_SECONDS)  # an index that is being built may take longer; its session ends with the process
        self._report()


@contextmanager
def keeping_views(run: Run) -> Iterator[ViewWork]:
    """Keep the views of a run's sinks during the block."""
    work = ViewWork(run)
    with work.working():
        yield work
