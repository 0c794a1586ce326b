"""The steps of a Kafka sink: at each the run dies, or is overtaken while halted; consumers get each change once.

The places follow each other in one pipeline's life, while writers are active all the time. Steps outside the sink are
covered in ``test_failpoints.py``.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sinks import kafka
from airflow_cdc_provider.engine.sinks.record_log import record
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.selection import Some
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.kafka_pipeline import KafkaPipeline
from tests.support.kafka_runs import assert_once, finish, kill
from tests.support.kafka_server import clear
from tests.support.sparkless import DONE, FAILED, SparklessRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# Each with the pass at which it is armed: every step has a transaction.
BEGINNING = ("in-transaction:1", "before-plan:1", "after-plan:1", "after-transaction:1")


OWNING = ("before-epoch:1", "after-epoch:1", "before-transaction-end:1", "after-transaction:1")


CHUNKS = (
    *("before-chunk-staged:1", "after-chunk-staged:1", "before-chunk-prepared:1", "before-chunk-commit:1"),
    *("after-chunk-commit:1", "in-transaction:4", "before-transaction-end:4", "after-transaction:4"),
)


UNITS = (
    *("before-batch-staged:1", "after-batch-staged:1", "before-batch-commit:1", "in-batch-commit:1"),
    *("in-transaction:3", "before-transaction-end:3", "after-transaction:3", "after-batch-commit:1"),
)


REREADS = ("before-reread-commit:1", "after-reread-commit:1")


DDL = ("before-redefinition:1", "after-redefinition:1")


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, kafka: KafkaServer) -> Iterator[KafkaPipeline]:
    made = KafkaPipeline(tmp_path, databases, ["public.t"], kafka.brokers)
    made.change(snapshot={"chunk_rows": 150})
    made.source(AUDITED)
    yield made
    for process in multiprocessing.active_children():
        process.kill()
    clear(made.cluster)


def overtake(pipeline: KafkaPipeline, place: str) -> None:
    name, _, number = place.partition(":")
    paused = SparklessRun(pipeline.file, f"{name}:pause:{number}")
    try:
        paused.await_pause()
        overtaking = SparklessRun(pipeline.file, takeover=True)
        assert (overtaking.wait(), overtaking.message) == (DONE, ""), place
    finally:
        paused.resume()
    assert paused.wait() in (DONE, FAILED), place
    assert "Traceback" not in paused.message, paused.message


def test_the_walk_passes_all_places() -> None:
    files = [*Path(kafka.__file__).parent.glob("*.py"), Path(record.__file__)]
    found = {
        name for file in files for name in re.findall(r'\bfailpoint\("([^"]+)"\)', file.read_text(encoding="utf-8"))
    }
    walked = {place.partition(":")[0] for place in (*BEGINNING, *OWNING, *CHUNKS, *UNITS, *REREADS, *DDL)}
    assert found == walked


def test_runs_that_die_leave_nothing_out_and_nothing_twice(pipeline: KafkaPipeline, some: Some) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        for place in some((*BEGINNING, *OWNING, *CHUNKS, *UNITS, *OWNING[:2])):
            kill(pipeline, place)
        finish(pipeline)
    assert_once(pipeline)
    assert pipeline.values() != pipeline.values(committed=False), "messages of those that died were aborted"


@pytest.mark.thorough
def test_a_run_that_is_overtaken_in_the_snapshot_adds_nothing(pipeline: KafkaPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        overtake(pipeline, "before-transaction-end:5")
        finish(pipeline)
    assert_once(pipeline)


@pytest.mark.thorough
def test_runs_that_are_overtaken_in_the_stream_add_nothing(pipeline: KafkaPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        finish(pipeline)
        for place in ("after-batch-staged:1", "before-transaction-end:3", OWNING[0]):
            overtake(pipeline, place)
        finish(pipeline)
    assert_once(pipeline)


@pytest.mark.thorough
def test_re_reads_and_changes_of_schema_that_break_off_are_taken_up_again(pipeline: KafkaPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        finish(pipeline)
        for place in REREADS:
            kill(pipeline, place, reread=["public.t"])
        finish(pipeline)
        for n, place in enumerate(DDL):
            pipeline.source(
                f"ALTER TABLE public.t ADD COLUMN more{n} int", f"UPDATE public.t SET more{n} = 7 WHERE id = 3"
            )
            kill(pipeline, place)
            finish(pipeline)
    pipeline.apply()
    pipeline.assert_verified()
