"""Runs into files that are killed and continued."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.files_pipeline import FilesPipeline
from tests.support.sparkless import DONE, SparklessRun


def kill(pipeline: FilesPipeline, place: str, reread: Sequence[str] = ()) -> None:
    name, _, number = place.partition(":")
    killed = SparklessRun(pipeline.file, f"{name}:kill:{number}", reread=reread)
    assert (killed.wait(), killed.message) == (-9, ""), place


def finish(pipeline: FilesPipeline) -> None:
    run = SparklessRun(pipeline.file)
    assert (run.wait(), run.message) == (DONE, "")
    pipeline.apply()
