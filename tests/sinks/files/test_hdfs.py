"""Files in HDFS: the calls behind commits, pipelines that die around the log's entries, and Spark as a plain reader."""

from __future__ import annotations

import multiprocessing
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import fsspec
import pytest
import requests
from pyspark.sql import SparkSession

from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConfigError, ConnectionFailed, Failpoint, MissingPrivilege
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.sinks.lake import hdfs as hdfs_module
from airflow_cdc_provider.engine.sinks.lake.hdfs import BrokenOff, Hdfs
from airflow_cdc_provider.engine.sinks.lake.storage import Storage
from tests.conftest import Databases
from tests.support.audited import AUDITED, LONG_PAUSE, writing
from tests.support.files_pipeline import FilesPipeline, assert_files_exactly_once
from tests.support.files_runs import finish, kill
from tests.support.files_sink import CHUNKS, change, chunk, effect, paths, provisioned, unit
from tests.support.hdfs import HdfsCluster
from tests.support.pipelines import SPARK_CONF
from tests.support.spark_jvm import local_session

pytestmark = pytest.mark.slow


@pytest.fixture
def place(hdfs: HdfsCluster) -> Storage:
    return Storage(hdfs.url) / uuid.uuid4().hex


def test_a_file_is_created_once(place: Storage) -> None:
    place.require_create()
    assert place.names() == []
    assert place.create("a/b%2Fc/_date=2026-11-22/x", b"one")
    assert not place.create("a/b%2Fc/_date=2026-11-22/x", b"two")
    assert place.read("a/b%2Fc/_date=2026-11-22/x") == b"one"
    assert place.files() == place.files("a") == ["a/b%2Fc/_date=2026-11-22/x"]


def test_of_those_who_create_a_file_at_once_one_does(place: Storage) -> None:
    writers = 3
    start = threading.Barrier(writers)

    def create(n: int) -> list[bool]:
        made = []
        for number in range(30):
            start.wait()
            made.append(place.create(str(number), f"{n}".encode()))
        return made

    with ThreadPoolExecutor(writers) as pool:
        found = list(pool.map(create, range(writers)))
    for number, made in enumerate(zip(*found, strict=True)):
        assert made.count(True) == 1
        assert place.read(str(number)) == str(made.index(True)).encode()
    assert len(place.files()) == 30, "nothing is left of the others"


def test_a_file_that_is_replaced_is_read_whole(place: Storage) -> None:
    contents = [b"%d" % n * (1 + 50_000 * (n % 2)) for n in range(10)]
    place.replace("x", contents[0])
    done = threading.Event()

    def read() -> set[bytes | None]:
        found = {place.read("x")}
        while not done.is_set():
            found.add(place.read("x"))
        return found

    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for _ in range(6):
            for content in contents:
                place.replace("x", content)
        done.set()
        assert reading.result() <= set(contents)
    assert place.files() == ["x"]


@pytest.mark.parametrize("times", [1, 4, 5])
def test_an_answer_that_breaks_off_is_asked_for_again(
    place: Storage, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A DataNode breaks off if the file it reads is replaced; retries are limited, as the file may be broken."""
    place.create("x", b"content")
    session = place._located[0].session
    get, asked = session.get, []

    def breaking(url: str) -> requests.Response:
        asked.append(url)
        if len(asked) <= times:
            raise BrokenOff("in the middle")
        return cast(requests.Response, get(url))

    monkeypatch.setattr(session, "get", breaking)
    if times < 5:
        assert place.read("x") == b"content"
    else:
        with pytest.raises(ConnectionFailed, match="in the middle"):
            place.read("x")


def test_what_is_there_of_a_file(place: Storage) -> None:
    place.create("empty", b"")
    place.create("some", b"0123456789")
    assert (place.read("empty"), place.read("empty", 4), place.size("empty")) == (b"", b"", 0)
    assert (place.read("some"), place.read("some", 4), place.read("some", 40)) == (
        b"0123456789",
        b"0123",
        b"0123456789",
    )
    assert place.size("some") == 10
    assert (place.read("none"), place.size("none"), place.modified("none")) == (None, None, None)
    assert place.names() == ["empty", "some"]
    assert place.names("none") == place.files("none") == []
    place.remove("some")
    place.remove("none")
    assert place.files() == ["empty"]


def test_large_files_are_written_in_pieces_and_gone_if_that_fails(place: Storage) -> None:
    megabyte = bytes(range(256)) * 4096
    with place.writing("large") as file:
        for _ in range(12):
            file.write(megabyte)
    assert place.size("large") == 12 << 20
    with place.reading("large") as file:
        file.seek(11 << 20)
        assert file.read() == megabyte
    with place.writing("nothing"):
        pass

    def break_off() -> None:
        with place.writing("broken") as file:
            for _ in range(12):
                file.write(megabyte)
            assert place.size("broken")
            raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        break_off()
    assert place.files() == ["large", "nothing"]


def test_what_writers_that_died_have_left_is_removed_in_time(place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hdfs, "rm", lambda *_, **__: None)
    monkeypatch.setenv(VARIABLE, "before-link:error")
    with pytest.raises(Failpoint):
        place.create("x", b"1")
    monkeypatch.undo()
    assert (len(place.files()), place.names(), place.read("x")) == (1, [], None)
    place.remove_unfinished()
    assert len(place.files()) == 1, "its writer may be alive"
    (name,) = place.files()
    system = place._fs
    system._call("SETTIMES", "put", place.path(name), modificationtime=1)
    place.remove_unfinished()
    assert place.files() == []


def test_who_may_not_write_is_told_so(hdfs: HdfsCluster, place: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is the one configured for fsspec."""
    place.create("x", b"1")
    place.create("hidden/y", b"1")
    place._fs._call("SETPERMISSION", "put", place.path("hidden"), permission="700")
    monkeypatch.setitem(fsspec.config.conf, "webhdfs", {"user": "nobody"})
    assert place.read("x") == b"1"
    refusals = (place.require_create, place.files, lambda: place.replace("x", b"2"), lambda: place.remove("x"))
    for refused in refusals:
        with pytest.raises(MissingPrivilege, match="nobody"):
            refused()
    assert place.read("x") == b"1"


def test_a_name_node_that_does_not_take_changes_is_a_store_that_cannot_be_reached(
    hdfs: HdfsCluster, place: Storage
) -> None:
    place.create("x", b"1")
    hdfs.administer("-safemode", "enter")
    try:
        for refused in (lambda: place.create("y", b"1"), lambda: place.replace("x", b"2"), lambda: place.remove("x")):
            with pytest.raises(ConnectionFailed, match="safe mode"):
                refused()
        assert (place.read("x"), place.files()) == (b"1", ["x"])
    finally:
        hdfs.administer("-safemode", "leave")


def test_an_error_of_a_data_node_is_not_taken_for_content(place: Storage) -> None:
    place.create("x", b"1")
    system = place._fs
    location = system._call("OPEN", path=place.path("x"), redirect=False).headers["Location"]
    place.remove("x")
    with pytest.raises(FileNotFoundError):
        system.session.get(location)


def test_a_name_node_that_stands_still_is_not_waited_for(
    hdfs: HdfsCluster, place: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_module, "_SECONDS", 0.2)
    with hdfs.paused(), pytest.raises(ConnectionFailed, match=r"no answer from .* \(ReadTimeout\)"):
        place.read("x")


def test_without_an_answer_nothing_is_taken_for_absent() -> None:
    gone = Storage("webhdfs://127.0.0.1:1/lake")
    for asked in (gone.read, gone.size, gone.names, gone.files, gone.remove):
        with pytest.raises(ConnectionFailed, match=r"no answer from 127\.0\.0\.1:1"):
            asked("x")


# -- pipelines -----------------------------------------------------------------------------------------


class HdfsPipeline(FilesPipeline):
    """A pipeline into HDFS, whose files DuckDB reads through fsspec."""

    def __init__(self, directory: Path, databases: Databases, place: Storage) -> None:
        super().__init__(directory, databases, ["public.t"], path=place.url)
        self.database.register_filesystem(fsspec.core.url_to_fs(place.url)[0])


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, place: Storage) -> Iterator[HdfsPipeline]:
    made = HdfsPipeline(tmp_path, databases, place)
    made.change(snapshot={"chunk_rows": 300})
    made.source(AUDITED)
    yield made
    for process in multiprocessing.active_children():
        process.kill()


@pytest.mark.thorough
def test_runs_that_die_around_an_entry_leave_nothing_out_and_nothing_twice(pipeline: HdfsPipeline) -> None:
    with writing(pipeline.databases.source, LONG_PAUSE):
        for place in ("before-link:1", "after-entry:1", "before-link:9", "after-link:9"):
            kill(pipeline, place)
    finish(pipeline)
    with writing(pipeline.databases.source, LONG_PAUSE):
        for place in ("in-batch-commit:1", "in-manifest:3"):
            kill(pipeline, place)
    finish(pipeline)
    assert_files_exactly_once(pipeline, 10)
    pipeline.assert_verified()


def test_the_other_url_of_hdfs_is_refused_with_the_one_to_use(pipeline: HdfsPipeline) -> None:
    pipeline.change(sink={"path": "hdfs://namenode:8020/lake"})
    with pytest.raises(ConfigError) as refused:
        pipeline.provision()
    assert "webhdfs://" in refused.value.solution
    (error,) = [found.error for found in preflight(pipeline.pipeline) if found.error is not None]
    assert "webhdfs://" in error.solution


# -- readers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session(SPARK_CONF) as session:
        yield session


@pytest.mark.spark
def test_spark_reads_what_the_list_names(
    request: pytest.FixtureRequest, hdfs: HdfsCluster, spark: SparkSession
) -> None:
    """Spark uses Hadoop's own protocol, as in the documentation."""
    with provisioned("hdfs", request) as sink:
        epoch = sink.take_epoch("me")
        chunk(sink, epoch, CHUNKS[0], ("1", "one", None), ("2", None, None))
        unit(sink, epoch, 50, 60, effect(change("i", 60, "3", None, None)))
        lake = sink.root.url.replace(hdfs.url, hdfs.hadoop)
        listed = [row.value for row in spark.read.text(f"{lake}/_manifest/public/t.txt").collect()]
        assert listed == paths(sink)
        files = [path.replace(hdfs.url, hdfs.hadoop) for path in listed]
        events = spark.read.option("basePath", f"{lake}/public/t").parquet(*files)
        assert sorted(tuple(row) for row in events.select("_op", "id").collect()) == [("i", 3), ("r", 1), ("r", 2)]
        assert "_date" in events.columns
