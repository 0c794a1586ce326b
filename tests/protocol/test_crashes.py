"""Commands that are killed in the middle of their work while writers continue, and that are started again.

A kill ends the driver, its JVM and the Python workers at once. Failpoints choose the places: a worker that has
committed its chunk and cannot report it, a driver between staging and commit, between the sink's commit and Spark's, a
slot reader that is about to acknowledge. Finished work must stay, unfinished work must be done, and nothing may happen
twice. In a mirror values are compared; in a changelog every change is counted against an audit trail that triggers
write on the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from demo import shop, shop_writers
from tests.conftest import Databases
from tests.support.audited import AUDITED, assert_exactly_once, writing
from tests.support.pipelines import Command, PipelineUnderTest


@pytest.fixture
def make_pipeline(databases: Databases, tmp_path: Path) -> Iterator[Any]:
    """Return a factory of pipelines of the test's databases, and kill commands that a failed test leaves running."""
    made: list[PipelineUnderTest] = []

    def make(tables: list[str], **sections: Any) -> PipelineUnderTest:
        made.append(PipelineUnderTest(tmp_path, databases, tables, **sections))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.end_commands()


def kill_when_paused(command: Command, count: int) -> None:
    """Kill a command when a failpoint has halted the given number of its processes."""
    command.until(lambda: command.paused() >= count, f"the failpoint in {count} processes")
    command.kill()


def await_own_death(command: Command) -> None:
    """Wait until the driver has killed itself at a failpoint, then kill its remaining processes."""
    assert command.wait().code == -9, command.output()
    command.kill()


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_mirror(make_pipeline: Any) -> None:
    pipeline: PipelineUnderTest = make_pipeline(["shop.*"], snapshot={"chunk_rows": 600})
    source = pipeline.databases.source
    with psycopg.connect(source, autocommit=True) as connection:
        shop.create_schema(connection)
    shop.load(source, scale=0.01)
    with shop_writers.Writers(source, rate=60, connections=2) as writers:
        # Killed in the snapshot: both tasks have committed their first chunk, but the driver never learns of it.
        kill_when_paused(pipeline.start("run", failpoint="after-chunk-commit:pause"), 2)
        first = pipeline.finished_chunks()
        assert len(first) == 2
        assert len(pipeline.record.unfinished) > 10

        # Killed in the stream, with a unit staged but not committed. The snapshot has continued where it was.
        kill_when_paused(pipeline.start("run", failpoint="after-batch-staged:pause"), 1)
        second = pipeline.finished_chunks()
        assert not pipeline.record.unfinished
        assert {key: second[key] for key in first} == first
        (later,) = {epoch for key, (_, epoch, *_) in second.items() if key not in first}
        assert all(epoch < later for _, epoch, *_ in first.values())
        before = pipeline.record.applied
        assert staging_tables(pipeline)

        # Killed with a unit committed in the sink but not in Spark's checkpoint: the stream continues after it.
        await_own_death(pipeline.start("run", failpoint="after-batch-commit:kill"))
        assert pipeline.finished_chunks() == second
        assert pipeline.record.applied > before
        assert pipeline.confirmed() <= before

        stream = pipeline.start("stream")
        pipeline.await_applied(stream)
        (checkpoint,) = pipeline.state.glob("checkpoint/*/*")  # none of the earlier ones
        assert checkpoint.parent.name == str(pipeline.record.epoch)
        assert pipeline.record.applied >= pipeline.record.high
        live = pipeline.json("verify")
        assert live["live"] is True

        # A comparison finds a damaged row while everything is running.
        (key,) = pipeline.source_rows("SELECT order_no FROM shop.order_lines WHERE line_no = 2 ORDER BY 1 LIMIT 1")[0]
        pipeline.source(f"INSERT INTO shop.order_lines VALUES ({key}, 77, 1, 'to be damaged')")
        pipeline.await_applied(stream)
        pipeline.target("UPDATE shop.order_lines SET article = 'damaged' WHERE line_no = 77")
        damage = {"kind": "different", "key": {"order_no": str(key), "line_no": "77"}}
        assert differences(pipeline.json("verify", code=4)) == [damage]
        assert stream.running
        assert writers.transactions > 0

    pipeline.await_applied(stream)
    pipeline.run("stop")
    assert stream.wait().code == 0, stream.output()
    idle = pipeline.json("verify", code=4)
    assert idle["live"] is False
    assert differences(idle) == [damage]
    assert f'"{key}"' in pipeline.run("verify", code=4).stdout
    pipeline.target("UPDATE shop.order_lines SET article = 'to be damaged' WHERE line_no = 77")
    assert pipeline.json("verify")["equal"] is True
    assert pipeline.finished_chunks() == second
    assert staging_tables(pipeline) == []


def differences(verified: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the differences of all tables."""
    return [difference for table in verified["tables"] for difference in table["differences"]]


def staging_tables(pipeline: PipelineUnderTest) -> list[str]:
    """Return the staging tables in the sink."""
    found = pipeline.target_rows("SELECT tablename FROM pg_tables WHERE schemaname = 'airflow_cdc' ORDER BY 1")
    return [name for (name,) in found if name.startswith("stage_")]


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_a_changelog(make_pipeline: Any) -> None:
    pipeline: PipelineUnderTest = make_pipeline(["public.t"], sink={"mode": "changelog"}, snapshot={"chunk_rows": 250})
    pipeline.source(AUDITED)
    with writing(pipeline.databases.source) as writers:
        # A worker dies with a chunk written but not committed: the command fails in good order, and no chunk counts.
        failed = pipeline.run("run", "--json", code=1, failpoint="before-chunk-commit:kill")
        assert failed.json["error"]["kind"] == "StreamFailed"
        assert pipeline.finished_chunks() == {}
        assert pipeline.target_rows("SELECT count(*) FROM public.t") == [(0,)]

        kill_when_paused(pipeline.start("run", failpoint="after-chunk-commit:pause"), 2)
        first = pipeline.finished_chunks()
        assert len(first) == 2

        # The commit of a stream unit is in progress, and is rolled back.
        await_own_death(pipeline.start("run", failpoint="in-batch-commit:kill"))
        second = pipeline.finished_chunks()
        assert {key: second[key] for key in first} == first
        assert not pipeline.record.unfinished
        assert pipeline.target_rows("SELECT count(*) FROM public.t WHERE _op <> 'r'") == [(0,)]

        # The unit is committed, but Spark does not know it.
        await_own_death(pipeline.start("run", failpoint="before-spark-commit:kill"))
        applied = pipeline.record.applied
        assert pipeline.confirmed() < applied

        # The slot's reader dies before it acknowledges; the driver notices.
        failed = pipeline.run("run", "--json", code=1, failpoint="before-acknowledgement:kill")
        assert failed.json["error"]["kind"] == "StreamFailed"
        assert pipeline.confirmed() < pipeline.record.applied
        assert pipeline.record.applied > applied

    pipeline.run("run")
    assert all(writer.transactions > 100 for writer in writers)
    assert pipeline.finished_chunks() == second
    assert staging_tables(pipeline) == []
    assert_exactly_once(pipeline)
    assert pipeline.json("verify")["equal"] is True
