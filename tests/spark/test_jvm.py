"""Spark's JVM of a process: the report on one that does not start, and the place of its output."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pyspark import SparkContext

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import SparkUnusable
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.spark import jvm
from airflow_cdc_provider.engine.state.files import State
from tests.conftest import Databases
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.streaming import Streaming

DIES = 'Exception in thread "main" java.io.IOException: No space left on device'
TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"

Fake = Callable[[str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a factory of Sparks whose JVM is a shell script, and let this process use it."""

    def make(script: str) -> None:
        home = tmp_path / "spark"
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / "spark-submit"
        program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("SPARK_HOME", str(home))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(SparkContext, "_gateway", None)
        monkeypatch.setattr(jvm, "_output", jvm._output)  # which the start of the script replaces

    return make


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"echo '{DIES}' >&2; exec sleep 1000", f"Spark's JVM could not start: {DIES}"),
        ("echo 'no java here' >&2; exit 0", "has ended with exit code 0 before it answered: no java here"),
        ("exit 127", "has ended with exit code 127 before it answered"),
        ("echo 'still downloading'; exec sleep 1000", "has written nothing for 1 seconds: still downloading"),
    ],
)
def test_a_jvm_that_does_not_answer(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """It may stay alive forever after an exception, or end normally without a word."""
    fake(script)
    monkeypatch.setattr(jvm, "SILENCE_SECONDS", 1.0 if "downloading" in script else SECONDS)
    with pytest.raises(SparkUnusable) as raised:
        jvm.start_jvm({"spark.master": "local[1]"}, "shop-stream")
    assert raised.value.message.endswith(said)
    assert str(jvm.log_path()) in raised.value.solution
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert "PYSPARK_GATEWAY_PORT" not in os.environ


@pytest.mark.lengthy
def test_logs_are_private_and_few(fake: Fake, tmp_path: Path) -> None:
    fake("echo hello; exit 1")
    for n in range(jvm.LOGS + 3):
        with pytest.raises(SparkUnusable):
            jvm.start_jvm({}, f"shop{n}-stream")
    folder = tmp_path / "home" / "airflow-cdc" / "logs"
    logs = list(folder.iterdir())
    assert len(logs) == jvm.LOGS
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert jvm.log_tail() == "hello"


def test_without_a_place_for_logs_spark_starts_all_the_same(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("exit 1")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(SparkUnusable):
        jvm.start_jvm({}, "shop-stream")
    path = jvm.log_path()
    assert path is not None
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("command", [["stream"], ["run"], ["resnapshot", "--all"]], ids=" ".join)
def test_a_run_that_cannot_start_spark_ends_nobody(
    databases: Databases, tmp_path: Path, fake: Fake, command: list[str]
) -> None:
    """Even with a takeover, the running run continues under its epoch."""
    fake(f"echo '{DIES}' >&2; exit 1")
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(TABLE, "INSERT INTO public.t SELECT n FROM generate_series(1, 20) n")
    pipeline.provision()
    pipeline.copy()
    stream = Streaming(pipeline)
    try:
        stream.until(lambda: commands.status(pipeline.pipeline)["state"] == "streaming", "the stream")
        epoch = pipeline.record.epoch
        ended = pipeline.start(*command, "--takeover", "--json").wait()
        assert (ended.code, ended.json["error"]["kind"]) == (1, "SparkUnusable")
        assert DIES in ended.json["error"]["message"]
        assert pipeline.record.epoch == epoch
        pipeline.source("INSERT INTO public.t VALUES (100)")
        count = "SELECT count(*) FROM public.t"
        stream.until(lambda: pipeline.target_rows(count) == [(21,)], "a change after it")
        found = commands.status(pipeline.pipeline)
        assert (found["state"], found["last_error"]) == ("streaming", None)
        assert not State(pipeline.pipeline.state).names("starting")
    finally:
        assert stream.run_ is not None
        stream.run_.ask_to_stop()
        stream.join(SECONDS)
    assert await_condition(lambda: commands.status(pipeline.pipeline)["state"] == "stopped", SECONDS)
