"""Transactions larger than any buffer pass with bounded memory, in a driver with a heap of 1 GiB.

What runs by default is many times the batch and the buffer, and far below what a machine has. The full size, 5 M rows
and 1 GB of values with the default batch, is for the asking: ``AIRFLOW_CDC_GIANT=full``
and ``-s`` to see the figures.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from airflow_cdc_provider.engine.table import human_bytes
from tests.conftest import Databases
from tests.pipelines import Command, PipelineUnderTest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]

FULL = os.environ.get("AIRFLOW_CDC_GIANT") == "full"
SECONDS = 3000.0
# Blocks are an eighth of a batch at most, a reader holds two batches, and a JVM has more than its heap.
BATCH = 64 << 20 if FULL else 4 << 20
MIB = 1 << 20
# Python with its libraries takes 150 to 200 MiB before it has seen a row.
BOUNDS = {"driver": 400 * MIB, "jvm": 1900 * MIB, "reader": 300 * MIB + 6 * BATCH, "worker": 400 * MIB + 20 * BATCH}

NARROW = 5_000_000 if FULL else 300_000
WIDE = 1000 if FULL else 100
CASES = {
    "narrow rows": f"INSERT INTO public.t SELECT n, NULL FROM generate_series(1, {NARROW}) n",
    "wide values": "INSERT INTO public.t SELECT n, (SELECT string_agg(md5(n || '.' || i), '')"
    f" FROM generate_series(1, 32768) i) FROM generate_series(1, {WIDE}) n",
}


class Peaks(threading.Thread):
    """The largest resident size that a process of each kind reaches, while a command runs."""

    def __init__(self, command: Command) -> None:
        super().__init__(name="peaks", daemon=True)
        self._command = command
        self._halt = threading.Event()
        self.peaks = Counter[str]()

    def run(self) -> None:
        while not self._halt.wait(0.3):
            for process in self._command.processes():
                try:
                    line, size = " ".join(process.cmdline()), process.memory_info().rss
                except psutil.Error:
                    continue
                kind = self._kind(process.pid, line)
                self.peaks[kind] = max(self.peaks[kind], size)

    def _kind(self, pid: int, line: str) -> str:
        if pid == self._command.process.pid:
            return "driver"
        if "/java" in line.split(" ")[0]:
            return "jvm"
        return "worker" if "pyspark.daemon" in line else "reader"

    def __enter__(self) -> Peaks:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt.set()
        self.join()


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> Iterator[PipelineUnderTest]:
    made = PipelineUnderTest(tmp_path, databases, ["public.t"], stream={"max_batch_bytes": BATCH})
    made.change(spark={"conf": {**made.document["spark"]["conf"], "spark.driver.memory": "1g"}})
    made.source("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    yield made
    made.end_commands()


@pytest.mark.parametrize("case", CASES)
def test_a_giant_transaction(pipeline: PipelineUnderTest, case: str) -> None:
    pipeline.provision()
    pipeline.copy()
    pipeline.source(CASES[case])
    ((rows, size),) = pipeline.source_rows("SELECT count(*), coalesce(sum(length(v)), 0)::bigint FROM public.t")
    with Peaks(stream := pipeline.start("stream", "--until", "caught-up", "--json")) as sampled:
        outcome = stream.wait(SECONDS)
    assert outcome.code == 0, stream.output()
    figures = ", ".join(f"{kind} {human_bytes(peak)}" for kind, peak in sorted(sampled.peaks.items()))
    print(f"{case}: {rows:,} rows with {human_bytes(size)} of values in one transaction; peaks: {figures}")
    query = "SELECT count(*), md5(string_agg(md5(t::text), '' ORDER BY id)) FROM public.t t"
    assert pipeline.target_rows(query) == pipeline.source_rows(query)
    assert {kind: peak for kind, peak in sampled.peaks.items() if peak > BOUNDS[kind]} == {}


def test_a_value_that_the_heap_cannot_hold_ends_the_job(pipeline: PipelineUnderTest) -> None:
    """It does not hang in a JVM that has lost threads, and goes on from where it was with more memory."""
    conf = pipeline.document["spark"]["conf"]
    pipeline.change(spark={"conf": {**conf, "spark.driver.memory": "480m"}})
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO public.t SELECT 1, repeat(md5('1'), 150 << 15)")
    error = pipeline.json("stream", "--until", "caught-up", code=1)["error"]
    assert error["kind"] == "SparkLost"
    pipeline.change(spark={"conf": {**conf, "spark.driver.memory": "3g"}})
    pipeline.run("stream", "--until", "caught-up")
    query = "SELECT id, length(v), md5(v) FROM public.t"
    assert pipeline.target_rows(query) == pipeline.source_rows(query) != []
