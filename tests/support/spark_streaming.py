"""The command ``stream`` with Spark, in a thread of the test: it shares the JVM of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest


class SparkStreaming(threading.Thread):
    """The command ``stream`` during the block, unless it fails before."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        super().__init__(name="Spark streaming", daemon=True)
        self._pipeline = pipeline
        self._result: dict[str, Any] | None = None
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = commands.stream(self._pipeline.pipeline)
        except BaseException as e:
            self._failure = e

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a state that the stream brings about; if it ends before, its error fails the test."""
        found = await_condition(lambda: condition() or not self.is_alive(), SECONDS)
        if not self.is_alive() and not condition():
            raise AssertionError(f"{what} did not come: the stream has ended") from self._failure
        assert found, f"{what} did not come"

    def await_applied(self) -> None:
        """Wait until all that is committed now is applied."""
        marker = self._pipeline.marker()
        self.until(lambda: self._pipeline.record.applied >= marker, "the stream at the marker")

    def failure(self) -> BaseException:
        """Wait for the error that ends the stream, and return it."""
        self.join(SECONDS)
        assert self._failure is not None, "the stream goes on" if self.is_alive() else self._result
        return self._failure

    def end(self) -> None:
        """Stop it with the command, as soon as it can be asked."""

        def ended() -> bool:
            commands.stop(self._pipeline.pipeline)
            return not self.is_alive()

        assert await_condition(ended, SECONDS, 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self.end()
