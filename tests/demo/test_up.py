"""``make up``: an Airflow in which users trigger the pipeline, and which leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from airflow_cdc_provider.engine.core.waiting import await_condition
from demo.work_directory import DAG
from local_servers.airflow_client import AirflowClient

SECONDS = 300.0
MARK = "CDC_TEST_UP"


def family(mark: str) -> dict[int, str]:
    """Return the processes with a mark in their environment; titles overwrite it in all but one process of Postgres."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


@pytest.mark.thorough
@pytest.mark.airflow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_it_runs_the_pipeline_until_it_is_interrupted(tmp_path: Path) -> None:
    mark, file = str(tmp_path), tmp_path / "log"
    with file.open("w") as log:
        command = [sys.executable, "-m", "demo.up"]
        up = subprocess.Popen(command, env={**os.environ, MARK: mark}, stdout=log, stderr=log)
    try:
        assert await_condition(lambda: "Ctrl-C" in file.read_text() or up.poll() is not None, SECONDS)
        said = dict(re.findall(r"(?m)^(Airflow|source|pipeline) +(\S+)", file.read_text()))
        client = AirflowClient(said["Airflow"])
        assert client.call("GET", "/connections/shop_source")["conn_type"] == "postgres_cdc"
        client.trigger(DAG)  # with the defaults of its form
        assert await_condition(lambda: "engine/job.py" in str(family(mark)), SECONDS, 0.5), file.read_text()
        started = family(mark)
        assert sum("/bin/postgres -D" in line for line in started.values()) == 2, started
        up.send_signal(signal.SIGINT)
        assert up.wait(SECONDS) == 0
        assert await_condition(lambda: not family(mark), 10), family(mark)  # guards are about to end
    finally:
        up.kill()
        print(file.read_text())
    assert not Path(said["pipeline"]).parents[1].exists()
