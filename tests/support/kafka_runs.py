"""Runs into Kafka that are killed and continued."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.kafka_pipeline import KafkaPipeline, assert_consumed_once
from tests.support.sparkless import DONE, SparklessRun


def kill(pipeline: KafkaPipeline, place: str, reread: Sequence[str] = ()) -> None:
    name, _, number = place.partition(":")
    killed = SparklessRun(pipeline.file, f"{name}:kill:{number}", reread=reread)
    assert (killed.wait(), killed.message) == (-9, ""), place


def finish(pipeline: KafkaPipeline) -> None:
    run = SparklessRun(pipeline.file)
    assert (run.wait(), run.message) == (DONE, "")
    pipeline.apply()


def assert_once(pipeline: KafkaPipeline) -> None:
    pipeline.apply()
    assert_consumed_once(pipeline)
    pipeline.assert_verified()
