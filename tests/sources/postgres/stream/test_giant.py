"""Transactions larger than any buffer, and rows as large as the heap, pass with bounded memory.

A transaction is passed, and then one of four times its size: no process may need more memory for it. By default both
are many times larger than the batch, so that a process that holds the larger one exceeds the bound. The full size (5
million rows and 1 GB of values with the default batch, and a row of 900 MiB) runs with ``AIRFLOW_CDC_GIANT=full``;
``-s`` shows the figures.
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

from airflow_cdc_provider.engine.core.text_output import human_bytes
from tests.conftest import Databases
from tests.support.class_archive import JVM_OPTIONS
from tests.support.pipelines import Command, PipelineUnderTest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]

FULL = os.environ.get("AIRFLOW_CDC_GIANT") == "full"
SECONDS = 3000.0
BATCH = 64 << 20 if FULL else 4 << 20
MIB = 1 << 20
# A JVM fills its heap before it collects, so the heap is its bound: memory outside the heap would show in its size.
HEAP = 1024 if FULL else 480
JVM = (HEAP + 400) * MIB
# Allowed growth of a process from the smaller transaction to the larger, which exceeds it by at least twice as much.
GROWTH = {"driver": 40 * MIB, "reader": 40 * MIB + BATCH, "worker": 40 * MIB + BATCH}

# Rows of a kilobyte, where not the full size is asked for: fewer rows of as many bytes take less time.
NARROW = (5_000_000, 2) if FULL else (120_000, 32)
WIDE = 1000
VALUE = (900 if FULL else 128) * MIB
CASES = {"many rows": NARROW} | ({"wide values": (WIDE, 32768)} if FULL else {})
"""Number of rows, and number of repetitions of 32 bytes in each."""


class Peaks(threading.Thread):
    """The largest resident size of a process of each kind while a command runs."""

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
    # Without the archive of classes, which would count as memory of the JVM because it is mapped.
    plain = {"spark.driver.extraJavaOptions": JVM_OPTIONS, "spark.driver.memory": f"{HEAP}m"}
    made.change(spark={"conf": {**made.document["spark"]["conf"], **plain}})
    made.source("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    yield made
    made.end_commands()


@pytest.mark.parametrize("case", CASES)
def test_a_giant_transaction(pipeline: PipelineUnderTest, case: str) -> None:
    count, repeated = CASES[case]
    pipeline.provision()
    pipeline.copy()
    stream = pipeline.start("stream")
    peaks = []
    with Peaks(stream) as sampled:
        for first, last in ((1, count // 4), (count // 4 + 1, count // 4 + count)):
            rows = f"SELECT n, repeat(md5(n::text), {repeated}) FROM generate_series({first}, {last}) n"
            pipeline.source(f"INSERT INTO public.t {rows}")
            end = pipeline.marker()
            stream.until(lambda: pipeline.record.applied >= end, "the end of the transaction", SECONDS)  # noqa: B023
            peaks.append(Counter(sampled.peaks))
    stream.terminate()
    assert stream.wait().code == 0, stream.output()
    before, after = peaks
    figures = ", ".join(
        f"{kind} {human_bytes(before[kind])}, then {human_bytes(after[kind])}" for kind in sorted(after)
    )
    size = human_bytes(count * repeated * 32)
    print(f"{case}: {count:,} rows with {size} of values in one transaction, after a quarter of that; peaks: {figures}")
    query = "SELECT count(*), md5(string_agg(md5(t::text), '' ORDER BY id)) FROM public.t t"
    assert pipeline.target_rows(query) == pipeline.source_rows(query)
    grown = {kind: after[kind] - before[kind] for kind in GROWTH}
    assert {kind: size for kind, size in grown.items() if size > GROWTH[kind]} == {}, figures
    assert after["jvm"] <= JVM, figures


def stream_until_caught_up(pipeline: PipelineUnderTest) -> Counter[str]:
    """Run the command, and return the peaks of its processes."""
    with Peaks(stream := pipeline.start("stream", "--until", "caught-up", "--json")) as sampled:
        outcome = stream.wait(SECONDS)
    assert outcome.code == 0, stream.output()
    return sampled.peaks


@pytest.mark.thorough
def test_a_row_that_the_heap_could_not_hold(pipeline: PipelineUnderTest) -> None:
    """It does not pass through the JVM, and what a killed job has deposited is removed."""
    pipeline.source("ALTER TABLE public.t ALTER v SET STORAGE EXTERNAL")  # compression would take long
    pipeline.provision()
    pipeline.copy()
    pipeline.source(f"INSERT INTO public.t SELECT 1, repeat(md5('1'), {VALUE >> 5})")
    killed = pipeline.start("stream", "--until", "caught-up")
    deposits = "SELECT relname FROM pg_class WHERE relname LIKE 'piece\\_%' AND relkind = 'r'"
    killed.until(lambda: bool(pipeline.target_rows(deposits)), "the deposit", SECONDS)
    killed.kill()
    peaks = stream_until_caught_up(pipeline)
    figures = ", ".join(f"{kind} {human_bytes(peak)}" for kind, peak in sorted(peaks.items()))
    print(f"a row of {human_bytes(VALUE)}; peaks: {figures}")
    query = "SELECT id, length(v), md5(v) FROM public.t"
    assert pipeline.target_rows(query) == pipeline.source_rows(query) != []
    assert pipeline.target_rows(deposits) == []
    # The reader has it in libpq's buffer, as a message, and joined with preceding messages in its block.
    # Python with its libraries takes 150 to 200 MiB before it reads a row.
    bounds = {"driver": 400 * MIB, "jvm": JVM, "reader": 400 * MIB + 3 * VALUE, "worker": 400 * MIB + 2 * VALUE}
    assert {kind: peak for kind, peak in peaks.items() if peak > bounds[kind]} == {}


@pytest.mark.thorough
def test_a_batch_that_the_heap_cannot_hold_ends_the_job(pipeline: PipelineUnderTest) -> None:
    """It does not hang in a JVM that has lost threads, and continues at its position with smaller batches."""
    conf = pipeline.document["spark"]["conf"]
    # If tasks run on other machines, pieces pass through the JVM.
    elsewhere = {"master": "local-cluster[1,1,1024]", "conf": {**conf, "spark.driver.memory": "480m"}}
    pipeline.change(spark=elsewhere, stream={"max_batch_bytes": 1 << 30})
    pipeline.provision()
    pipeline.copy()
    pipeline.source("INSERT INTO public.t SELECT n, repeat(md5('1'), 1 << 15) FROM generate_series(1, 400) n")
    failed = pipeline.start("stream", "--until", "caught-up", "--json").wait(SECONDS)
    assert failed.code == 1, failed.stderr[-4000:]
    assert failed.json["error"]["kind"] == "SparkLost"
    pipeline.change(spark={"master": "local[2]", "conf": conf}, stream={"max_batch_bytes": BATCH})
    stream_until_caught_up(pipeline)
    query = "SELECT id, length(v), md5(v) FROM public.t"
    assert pipeline.target_rows(query) == pipeline.source_rows(query) != []
