"""The command ``stream`` without Spark, in a thread of the test."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.runs.progress import StreamProgress
from airflow_cdc_provider.engine.runs.restarting import keep_trying
from airflow_cdc_provider.engine.runs.run import Run, run_part
from tests.support.engine_parts import follow_log
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest


class Streaming(threading.Thread):
    """The command ``stream`` in a thread: the run, and within it one attempt after another."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        super().__init__(name="streaming", daemon=True)
        self._pipeline = pipeline.pipeline
        self.run_: Run | None = None
        self.attempts = 0
        self.waiting: str | None = None
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with run_part(self._pipeline, "stream", None) as (run, record):
                self.run_ = run
                keep_trying(run, record, self._attempt)
        except BaseException as e:
            self.failure = e

    @classmethod
    def begun(cls, pipeline: PipelineUnderTest) -> Streaming:
        """Return a stream that has reported its first heartbeat."""
        made = cls(pipeline)
        made.until(lambda: commands.status(pipeline.pipeline)["state"] == "streaming", "its heartbeat")
        return made

    def _attempt(self, record: Record) -> None:
        self.attempts += 1
        assert self.run_ is not None
        follow_log(self.run_, record, None, self._report)

    def _report(self, progress: StreamProgress) -> None:
        self.waiting = progress.waiting

    @property
    def restart(self) -> dict[str, Any] | None:
        """Return what the stream reports while it waits."""
        return None if self.run_ is None else self.run_.progress.get("restart")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a state; if the stream has ended, its error fails the test."""
        found = await_condition(lambda: self.failure is not None or condition(), SECONDS)
        if self.failure is not None:
            raise self.failure
        assert found, f"{what} did not come: {self.restart}"

    def await_trouble(self, pattern: str) -> dict[str, Any]:
        """Wait until the stream waits for the next attempt because of an error whose message matches the pattern."""
        seen: list[dict[str, Any]] = []

        def waits() -> bool:
            restart = self.restart
            if restart is not None:
                seen.append(restart)
            return restart is not None and re.search(pattern, restart["error"]["message"]) is not None

        try:
            self.until(waits, f"trouble with {pattern}")
        except AssertionError as e:
            raise AssertionError(f"{e}; seen: { {each['error']['message'] for each in seen} }") from e
        return seen[-1]

    def end(self) -> None:
        """Stop like the command ``stop``, and raise the error that ended the stream before, if any."""
        if self.run_ is not None:
            self.run_.ask_to_stop()
        self.join(SECONDS)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
