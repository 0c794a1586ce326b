"""The benchmarks run, check their results, and say what they measured; how fast they were is not looked at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.report import Series, WrongResult, as_json, as_text, check
from benchmarks.soak import Sample, Soak

MIB = 1 << 20
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
    ours = as_json([*series, Series("more", 100, (1.0,), "peer", ("ours",))])[-1]
    assert (ours["ratio"], ours["others"]) == (2.0, {"ours": 1.0})


def test_a_wrong_result_is_an_error() -> None:
    check(3, 3, "rows")
    with pytest.raises(WrongResult, match="rows: 2, but 3 is right"):
        check(3, 2, "rows")


def test_an_unknown_case_is_refused() -> None:
    refused = run("windows")
    assert refused.returncode == 2
    assert "stream-noop" in refused.stderr


def test_the_dags_are_parsed_in_fresh_interpreters(tmp_path: Path) -> None:
    file = tmp_path / "parsing.json"
    done = run("parsing", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["files"] == len(list((ROOT / "dags").glob("*.py")))
    assert figures["dags"] >= figures["files"]
    assert 0 < figures["again"] < figures["first"]


@pytest.mark.spark
def test_all_cases_run_and_are_right(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run("--rows", "4000", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["repeat"] == 1
    assert figures["machine"]["cores"] > 0
    assert {each["case"]: each["peer"] for each in figures["cases"]} == PEERS
    for each in figures["cases"]:
        assert each["case"] in done.stdout
        assert each["rows"] == 4000
        assert len(each["seconds"]) == 1
        assert each["rows_per_second"].keys() == {"median", "min", "max"}
        assert all(rate > 0 for rate in each["rows_per_second"].values())
        assert (each["ratio"] is None) == (each["peer"] is None)


@pytest.mark.spark
def test_kafka_runs_at_both_ends_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "kafka.json"
    done = run("kafka", "--rows", "1000", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    peers = {each["case"]: [each["peer"], *each["others"]] for each in cases if each["peer"]}
    assert peers == {
        case: [f"{case}: plain producer", f"{case}: Spark's sink", *more]
        for case, more in {
            "postgres to kafka, debezium": (),
            "postgres to kafka, json": (),
            "kafka to kafka": ("kafka to kafka: Spark's streaming query",),
        }.items()
    }
    assert "kafka to mysql" in done.stdout
    assert all(each["rows_per_second"]["median"] > 0 for each in cases)


@pytest.mark.spark
def test_the_soak_runs_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = run("soak", "--seconds", "6", "--rate", "500", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "changes in 6 s; a run of less than 120 s is not judged" in done.stdout
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["changes"] > 0
    assert len(figures["samples"]) > 2
    assert all(min(sample["driver"], sample["jvm"], sample["workers"]) > 0 for sample in figures["samples"])


def soak(growth: int = 0, retained: int = 0, seconds: float = 600.0) -> Soak:
    """A run of samples five seconds apart: the JVM grows, and so does what the slot retains, by MiB a minute."""

    def sample(i: int) -> Sample:
        noise = 20 * MIB * (i % 3)
        minutes = i / 12
        log, jvm = int(retained * minutes * MIB), 600 * MIB + noise + int(growth * minutes * MIB)
        return Sample(5.0 * i, log, 0, 150 * MIB, jvm, 700 * MIB + noise, i)

    return Soak(seconds, tuple(map(sample, range(int(seconds / 5)))))


def test_growth_is_told_from_noise() -> None:
    assert soak().faults == ()
    assert "stayed within their bounds" in soak().as_text()
    assert soak(growth=5).faults == ()
    (fault,) = soak(growth=20).faults
    assert soak(growth=20).growth("jvm") == pytest.approx(20 * 5 * MIB, rel=0.05)
    assert re.fullmatch(r"jvm grew by \d+\.\d MiB over the second half of the run; 7\d\.\d MiB are allowed", fault)
    assert fault in soak(growth=20).as_text()


def test_log_that_is_retained_without_bound_is_a_fault() -> None:
    grown, peak = soak(retained=10).faults
    assert grown.startswith("retained grew by 49")
    assert peak == "the slot retained up to 99.2 MiB; 4 batches of 16 MiB are allowed"


def test_a_short_soak_is_not_judged() -> None:
    assert soak(growth=500, seconds=60.0).faults == ()
    assert "is not judged" in soak(seconds=60.0).as_text()


def test_the_soak_fails_beyond_its_bounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "soak.json"
    monkeypatch.setattr("benchmarks.soak.measure", lambda seconds, rate: soak(growth=20))
    assert main(["soak", "--json", str(file)]) == 1
    assert "benchmark failed: jvm grew by" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["faults"]) == 1
    monkeypatch.setattr("benchmarks.soak.measure", lambda seconds, rate: soak())
    assert main(["soak"]) == 0
