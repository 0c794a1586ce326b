"""Drains and snapshots run into every store, with every peer and of every shape, and yield the right results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import JDBC
from benchmarks.peers import debezium
from benchmarks.peers.counter import JdkMissing
from benchmarks.shapes import ROWS, Shape
from local_servers.jars import JarsMissing, fetch
from tests.support.hostile import ENVIRONMENT

ROOT = Path(__file__).parents[2]
# Each counts changes with its own engine, without ours.
COUNTERS = ("debezium-json", "debezium-snapshot")
INTO_STORES = ("stream-changelog", "stream-files", "stream-delta", "stream-mysql", "stream-kafka")
SNAPSHOTS = ("snapshot-files", "pg_dump", "spark-jdbc", "spark-jdbc-parquet")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    # For so few rows, compiling well costs more than it saves.
    environment = os.environ | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
    for name in ENVIRONMENT:  # not for the peers
        del environment[name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False, env=environment)


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_other_stores_and_peers_run_and_are_right(tmp_path: Path) -> None:
    try:
        fetch(JDBC)
        debezium.fetch_jars()
    except (JarsMissing, JdkMissing) as e:
        pytest.skip(e.message)
    file = tmp_path / "figures.json"
    cases = ("subscription", "planning", "concurrent-load", *COUNTERS, *INTO_STORES, *SNAPSHOTS)
    done = run(*cases, "--rows", "2000", "--repeat", "1", "--readers", "2", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    found = {each["case"]: each for each in json.loads(file.read_text())["cases"]}
    assert found.keys() >= {*cases, "snapshot-files, 1 reader", "pgbench alone"} - {"concurrent-load"}
    assert found["stream-mysql"]["peer"] == "pg_recvlogical"
    assert found["stream-mysql"]["others"].keys() == {"debezium-json"}
    assert found["snapshot-files"]["others"].keys() == {"spark-jdbc-parquet", "debezium-snapshot"}
    assert found["pgbench during a snapshot"]["ratio"] > 0


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_backlogs_of_other_shapes_run_and_are_right(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    shapes = ("narrow,single", "wide,giant,2-tables", "toasted,3-tables")
    options = [option for shape in shapes for option in ("--shape", shape)]
    done = run("stream-mirror", "subscription", *options, "--rows", "3000", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    found = {each["case"]: each["peer"] for each in json.loads(file.read_text())["cases"]}
    assert found["stream-mirror, wide, giant, 2-tables"] == "pg_recvlogical, wide, giant, 2-tables"
    assert len(found) == 3 * len(shapes)


@pytest.mark.lengthy
def test_shapes_are_named_by_what_is_not_the_default() -> None:
    assert Shape.parse("100-byte,thousand,1-tables") == Shape()
    assert Shape().title == ""
    for text in (*(name for name in ROWS if name != "100-byte"), "single", "narrow,giant,500-tables"):
        assert Shape.parse(text).title == f", {text.replace(',', ', ')}"
    with pytest.raises(ValueError, match="'huge' is not one of narrow, 100-byte"):
        Shape.parse("narrow,huge")
    assert run("--shape", "no-tables").returncode == 2
