"""The benchmarks run, check their results, and say what they measured; how fast they were is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Series, WrongResult, as_json, as_text, check
from benchmarks.soak import Sample, Soak

ROOT = Path(__file__).parents[1]
PEERS = {"copy | copy": None, "snapshot": "copy | copy", "pg_recvlogical": None} | dict.fromkeys(
    ("stream-noop", "stream-parquet", "stream-mirror"), "pg_recvlogical"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_rates_are_compared_with_the_peer() -> None:
    series = [Series("peer", 100, (1.0, 4.0, 2.0)), Series("ours", 100, (0.5, 1.0, 2.0), "peer")]
    peer, ours = as_json(series)
    assert peer["rows_per_second"] == {"median": 50, "min": 25, "max": 100}
    assert (peer["ratio"], ours["ratio"]) == (None, 2.0)
    assert "2.00 x peer" in as_text(series)


def test_a_wrong_result_is_an_error() -> None:
    check(3, 3, "rows")
    with pytest.raises(WrongResult, match="rows: 2, but 3 is right"):
        check(3, 2, "rows")


def test_an_unknown_case_is_refused() -> None:
    refused = run("windows")
    assert refused.returncode == 2
    assert "stream-noop" in refused.stderr


@pytest.mark.spark
def test_all_cases_run_and_are_right(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run("--rows", "20000", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["repeat"] == 1
    assert figures["machine"]["cores"] > 0
    assert {each["case"]: each["peer"] for each in figures["cases"]} == PEERS
    for each in figures["cases"]:
        assert each["case"] in done.stdout
        assert each["rows"] == 20_000
        assert len(each["seconds"]) == 1
        assert each["rows_per_second"].keys() == {"median", "min", "max"}
        assert all(rate > 0 for rate in each["rows_per_second"].values())
        assert (each["ratio"] is None) == (each["peer"] is None)


@pytest.mark.spark
def test_the_soak_runs_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = run("soak", "--seconds", "6", "--rate", "500", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "changes in 6 s; retained log" in done.stdout
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["changes"] > 0
    assert len(figures["samples"]) > 2
    assert all(min(sample["driver"], sample["jvm"], sample["workers"]) > 0 for sample in figures["samples"])


def test_growth_is_told_from_noise() -> None:
    def soak(growth: int) -> Soak:
        return Soak(300.0, tuple(Sample(5.0 * i, 1000, 0, 100, 700 + growth * i, 200, i) for i in range(60)))

    assert soak(0).memory_flat
    assert not soak(10).memory_flat
    assert soak(10).slope("jvm") == pytest.approx(120)
    assert soak(0).retained_bounded
