"""A local Spark listens on loopback only, and communicates with its Python processes at a private place."""

from __future__ import annotations

import multiprocessing
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.spark.jvm import launch_command
from airflow_cdc_provider.engine.spark.local_spark import local_address
from airflow_cdc_provider.engine.spark.session import DEFAULTS, defaults_on, spark_session
from tests.support.class_archive import JVM_CONF

DOCUMENT: dict[str, Any] = {
    "pipeline": "shop",
    "source": {"dsn": "postgresql://cdc@db/shop", "tables": ["public.t"]},
    "sink": {"dsn": "postgresql://cdc@db/dw"},
    "state": "/nowhere",
}


def seen(conf: dict[str, str]) -> tuple[set[str], str, list[str]]:
    """Return the addresses at which a Spark with its web UI listens, and mode and contents of its socket folder."""
    os.umask(0)
    pipeline = Pipeline.parse({**DOCUMENT, "spark": {"master": "local[1]", "conf": conf}})
    with spark_session(pipeline.spark_start, "stream") as spark:
        context = spark.sparkContext
        assert context.uiWebUrl is not None

        def task(_: int) -> int:
            return len(os.listdir(folder))

        folder = context.getConf().get("spark.python.unix.domain.socket.dir")
        assert folder is not None
        assert context.parallelize([0], 1).map(task).collect()[0] > 0, "a socket while a task runs"
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        listening = {
            connection.laddr.ip
            for process in family
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        return listening, stat.filemode(os.stat(folder).st_mode), [folder]


def in_another_process(conf: dict[str, str]) -> tuple[set[str], str, list[str]]:
    """Run in another process, because a JVM keeps the environment of its start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(seen, conf).result()


@pytest.mark.spark
def test_nobody_of_another_machine_or_another_user_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    listening, mode, (folder,) = in_another_process(JVM_CONF)
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert mode == "drwx------"
    assert not Path(folder).exists(), "it ends with the process"


def test_a_configuration_that_says_otherwise_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    assert local_address({"spark.ui.port": "4050"}) == {"SPARK_LOCAL_IP": "127.0.0.1"}
    assert local_address({"spark.driver.bindAddress": "0.0.0.0"}) == {}
    assert local_address({"spark.driver.host": "driver"}) == {}
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.5")
    assert local_address({}) == {}


def test_no_configuration_that_is_named_like_a_secret_is_on_the_command_line() -> None:
    names = ("spark.hadoop.fs.s3a.secret.key", "spark.hadoop.fs.s3a.access.key", "spark.a.Password", "spark.b.token")
    command = launch_command({"spark.ui.port": "4050", **dict.fromkeys(names, "n0tTelling")})
    assert "spark.ui.port=4050" in command
    assert "n0tTelling" not in " ".join(command)


def test_on_a_cluster_sparks_own_defaults_hold() -> None:
    assert defaults_on("spark://master:7077") == DEFAULTS
    assert defaults_on("local[2]").keys() - DEFAULTS.keys() == {
        "spark.python.unix.domain.socket.enabled",
        "spark.python.unix.domain.socket.dir",
    }
