"""The benchmarks run, check their results, and report their figures; their speed does not matter here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import docs, suite
from benchmarks.__main__ import CASES, main
from benchmarks.peers import flink_join
from benchmarks.peers.counter import JdkMissing
from benchmarks.processes import KINDS
from benchmarks.report import Series, WrongResult, as_json, as_text, check
from benchmarks.samples import Sample
from benchmarks.soak import Soak
from benchmarks.sustained import NOT_HELD, Load, Sustained
from local_servers.jars import JarsMissing
from tests.support.hostile import ENVIRONMENT

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
PEERS = {"copy | copy": None, "snapshot": "copy | copy", "pg_recvlogical": None} | dict.fromkeys(
    ("stream-noop", "stream-parquet", "stream-mirror"), "pg_recvlogical"
)
SMALL = ("--rows", "4000", "--repeat", "1")


def run(*arguments: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    peaceful = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}  # for the peers
    return subprocess.run(command, cwd=ROOT, env=peaceful, capture_output=True, text=True, timeout=seconds, check=False)


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
    with pytest.raises(WrongResult, match="rows: 2, but expected 3"):
        check(3, 2, "rows")


def test_throughput_is_drawn_beside_its_peers(tmp_path: Path) -> None:
    series = [Series("copy | copy", 100, (1.0, 4.0)), Series("ours", 100, (0.5, 1.0), "copy | copy")]
    machine = dict.fromkeys(("date", "platform", "cores", "memory_gib", "load_before"), 2)
    versions = dict.fromkeys(("postgres", "spark", "python", "pyarrow"), "1.0")
    figures = {"machine": machine | versions, "repeat": 2, "cases": as_json(series), "findings": {}}
    assert_documented(figures, tmp_path, "cases")
    assert r"| `ours` | 2.40x copy \| copy | 150 (100-200) |" in (tmp_path / "benchmarks.md").read_text()


def test_runs_are_told_apart(tmp_path: Path) -> None:
    machine = dict.fromkeys(("platform", "cores", "memory_gib", "load_before", "postgres", "spark", "python"), 2)
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- figures: cases -->\n<!-- end -->\n<!-- figures: parsing -->\n<!-- end -->\n")
    parsing = dict.fromkeys(("files", "dags", "modules", "first", "again"), 3)
    runs = [
        {
            "machine": {**machine, "pyarrow": "1", "date": date},
            "repeat": repeat,
            "cases": as_json([Series(case, 100, (1.0,))]),
            "findings": {"parsing": parsing} if repeat == 2 else {},
        }
        for date, repeat, case in (("monday", 2, "ours"), ("tuesday", 3, "more"))
    ]
    docs.write(runs, tmp_path)
    cases, parsed = page.read_text().split("<!-- figures: parsing -->")
    places = [cases.index(text) for text in ("monday", "repeats: 2", "`ours`", "tuesday", "repeats: 3", "`more`")]
    assert places == sorted(places)
    assert "monday" in parsed
    assert "tuesday" not in parsed


def test_the_suite_measures_every_case() -> None:
    assert {word for arguments in suite.RUNS.values() for word in arguments.split() if word in CASES} == CASES.keys()
    with pytest.raises(SystemExit):
        suite.main(["windows"])


@pytest.mark.lengthy
def test_only_the_plots_need_matplotlib() -> None:
    modules = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("docs", "plots")]
    program = (
        f"import sys; {'; '.join(f'import benchmarks.{name}' for name in modules)}; print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_page_has_a_place_for_every_finding() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(re.findall(r"<!-- figures: (\w+) -->", page)) == docs.TABLES.keys()
    for name in CASES:
        assert f"`{name}`" in page


@pytest.mark.lengthy
def test_an_unknown_case_is_refused() -> None:
    refused = run("windows")
    assert refused.returncode == 2
    assert "stream-noop" in refused.stderr


@pytest.mark.lengthy
def test_the_dags_are_parsed_in_fresh_interpreters(tmp_path: Path) -> None:
    file = tmp_path / "parsing.json"
    done = run("parsing", "--repeat", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(file.read_text())["findings"]["parsing"]
    assert figures["files"] == len(list((ROOT / "dags").glob("*.py")))
    assert figures["dags"] >= figures["files"]
    assert min(figures["first"], figures["again"]) > 0


@pytest.mark.thorough
@pytest.mark.spark
def test_throughput_is_measured_and_right(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = run("snapshot", "stream-noop", "stream-parquet", "stream-mirror", *SMALL, "--json", str(file))
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


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_what_follows_writes_runs_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    sizes = "--repeat 1 --seconds 2 --rates 200 --batches 2 --rows 2000 --tables 3 --backlog 3000 --executors"
    done = run("latency", "floor", "sustained", "scaling", "startup", *sizes.split(), "--json", str(file), seconds=580)
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["failures"] in ([], [NOT_HELD]), done.stderr[-4000:]  # a busy machine may be slow, but never wrong
    assert done.returncode == len(figures["failures"])
    found = figures["findings"]
    (rate,) = found["latency"]["rates"]
    assert rate["written"]["median"] > 0
    assert 0 < rate["milliseconds"]["p50"]["median"] <= rate["milliseconds"]["max"]["median"]
    assert all(len(found["floor"][kind]["batches"]) >= 2 for kind in ("empty", "one row"))
    (probe,) = found["sustained"]["probes"]
    assert len(probe["samples"]) > 2
    assert all(probe["cpu_per_million"][kind] > 0 for kind in ("jvm", "target"))
    points = {axis: [(each["x"], each["changes"]) for each in points] for axis, points in found["scaling"].items()}
    assert points == {"tables": [(3, 2000)], "backlog": [(3000, 3000)]}
    assert all(each["cpu_microseconds"]["median"] > 0 for points in found["scaling"].values() for each in points)
    startup = {kind: each["median"] for kind, each in found["startup"].items()}
    assert 0 < startup["cold_connected"] < startup["cold"]
    assert startup["warm"] > 0
    assert_documented(figures, tmp_path, "latency", "floor", "sustained", "scaling", "startup")


def assert_documented(figures: dict[str, Any], directory: Path, *names: str) -> None:
    """Check that the figures appear on a page, and yield the same bytes when repeated."""
    page, folder = directory / "benchmarks.md", directory / "benchmarks"
    page.write_text(
        "".join(f"before {name}\n<!-- figures: {name} -->\nstale\n<!-- end -->\n" for name in (*names, "x"))
    )
    written = []
    for _ in range(2):
        docs.write([figures], directory)
        written.append([each.read_bytes() for each in (page, *sorted(folder.iterdir()))])
    assert written[0] == written[1]
    text = page.read_text()
    assert text.count("stale") == 1
    assert text.endswith("<!-- figures: x -->\nstale\n<!-- end -->\n")
    plots = re.findall(r"!\[[\w]+\]\(benchmarks/(\w+\.svg)\)", text)
    assert sorted(plots) == sorted(each.name for each in folder.iterdir())
    assert all(b"</svg>" in (folder / plot).read_bytes() for plot in plots)


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_kafka_runs_at_both_ends_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "kafka.json"
    done = run("kafka", "--rows", "1000", "--repeat", "1", "--json", str(file), seconds=580)
    assert done.returncode == 0, done.stderr[-4000:]
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    peers = {each["case"]: [each["peer"], *each["others"]] for each in cases if each["peer"]}
    assert peers.pop("kafka to mysql: verify") == ["kafka to mysql"]
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


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_wide_tables_are_joined_by_all_means_and_right(tmp_path: Path) -> None:
    try:
        flink_join.fetch_jars()
    except (JarsMissing, JdkMissing) as e:
        pytest.skip(e.message)
    file = tmp_path / "joins.json"
    done = run("joins", "--rows", "4000", "--repeat", "1", "--json", str(file), seconds=580)
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(file.read_text())
    found = figures["findings"]["joins"]
    assert found["upkeep_seconds_a_unit"].keys() >= {"view", "REFRESH MATERIALIZED VIEW"}
    assert bool(found["pg_ivm"]) == ("pg_ivm" in found["upkeep_seconds_a_unit"]) == (not found["left_out"])
    assert found["followed"].keys() == {"view", "Flink SQL"}
    assert found["followed"]["view"]["wrong_rows"]["median"] == 0
    for each in found["followed"].values():
        assert each["changes_per_second"]["median"] > 0
        assert 0 < each["connected_seconds"]["median"] < each["recovered_seconds"]["median"]
        assert each["state_mib"]["median"] > 0
    assert_documented(figures, tmp_path, "joins")


@pytest.mark.thorough
@pytest.mark.spark
def test_the_soak_runs_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = run("soak", "--seconds", "6", "--rate", "500", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "changes in 6 s; a run of less than 120 s is not judged" in done.stdout
    figures: dict[str, Any] = json.loads(file.read_text())["findings"]["soak"]
    assert figures["changes"] > 0
    assert len(figures["samples"]) > 2
    assert all(
        min(sample[kind] for kind in ("driver", "jvm", "workers", "reader")) > 0 for sample in figures["samples"]
    )


def soak(growth: int = 0, retained: int = 0, seconds: float = 600.0) -> Soak:
    """Return a run of samples five seconds apart: the JVM and the log retained by the slot grow by MiB per minute."""

    def sample(i: int) -> Sample:
        noise = 20 * MIB * (i % 3)
        minutes = i / 12
        log, jvm = int(retained * minutes * MIB), 600 * MIB + noise + int(growth * minutes * MIB)
        return Sample(5.0 * i, 0.5, log, 0, 150 * MIB, jvm, 600 * MIB + noise, 100 * MIB, i)

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
    (fault,) = json.loads(file.read_text())["failures"]
    assert fault.startswith("jvm grew by")
    monkeypatch.setattr("benchmarks.soak.measure", lambda seconds, rate: soak())
    assert main(["soak"]) == 0


def load(rate: int, written: float = 1.0, behind: float = 1.0) -> Load:
    """Return ten seconds at a rate, a part of which was written, with a lag in seconds."""
    samples = [Sample(at, behind, 0, 0, 1, 1, 1, 1, round(rate * at * written)) for at in (0.0, 10.0)]
    return Load(rate, 10.0, tuple(samples), dict.fromkeys(KINDS, 2.0))


def test_a_rate_is_held_when_all_of_it_is_written_and_followed() -> None:
    assert load(1000).held
    assert load(1000, written=0.9).verdict == "not written"
    assert load(1000, behind=5.0).verdict == "not followed"
    assert load(1000).cpu_per_million["jvm"] == 200.0


def test_the_highest_rate_counts_that_is_held_each_time() -> None:
    probes = (load(1000), load(2000), load(4000, behind=9.0))
    found = Sustained(10.0, probes, (load(2000), load(2000, behind=6.0), load(1000), load(1000)))
    assert (found.rate, len(found.steady), found.faults) == (1000, 2, ())
    assert found.as_json()["cpu_per_million"]["target"] == {"median": 200.0, "min": 200.0, "max": 200.0}
    lost = Sustained(10.0, (load(1000, behind=9.0),), ())
    assert (lost.rate, lost.faults, lost.as_json()["cpu_per_million"]) == (0, (NOT_HELD,), {})
    assert "not followed" in lost.as_text()
