"""The slot's budget while a server is down."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import SlotBudgetExceeded
from airflow_cdc_provider.engine.slot import read_slot
from tests.outages.conftest import Pair
from tests.outages.scene import QUICK, SECONDS, applied, copied, marker
from tests.pipelines import PipelineUnderTest
from tests.streaming import Streaming

pytestmark = pytest.mark.slow


def overflow(pipeline: PipelineUnderTest) -> None:
    """Write more log than the budget of these tests."""
    pipeline.source("SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000)) FROM generate_series(1, 3)")


@pytest.mark.parametrize("action", ["warn", "stop", "drop-slot"])
def test_the_budget_is_kept_while_the_target_is_down(
    pair: Pair, make: Callable[..., PipelineUnderTest], action: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = copied(make(restart=QUICK | {"attempts": 10_000}, max_retained_wal="2MiB", on_max_retained_wal=action))
    stream = Streaming(pipeline)
    first = marker(pipeline)
    stream.until(lambda: applied(pipeline) >= first, "the first marker")
    pair.target.stop("immediate")
    stream.await_trouble("Connection refused")
    overflow(pipeline)
    slot = pipeline.pipeline.source.slot
    if action == "warn":
        stream.until(lambda: "of stream.max_retained_wal (2.0 MiB)" in caplog.text, "the warning")
        budget = commands.status(pipeline.pipeline)["slot"]["budget"]
        assert budget == {"max_retained_bytes": 2 << 20, "action": "warn", "level": "exceeded"}
        assert "of 2.0 MiB (beyond the budget)" in pipeline.run("status").stdout
        pair.target.start()
        end = marker(pipeline)
        stream.until(lambda: applied(pipeline) >= end, "the end")
        stream.end()
        return
    stream.join(SECONDS)
    assert isinstance(stream.failure, SlotBudgetExceeded)
    assert "stream.max_retained_wal is 2.0 MiB" in stream.failure.message
    with connected(pair.source.dsn()) as source:
        assert (read_slot(source, slot) is None) == (action == "drop-slot")
