"""``python -m benchmarks.docs FILE …``: write the figures of runs into the documentation.

Each table goes between ``<!-- figures: NAME -->`` and ``<!-- end -->`` of :file:`docs/benchmarks.md`, each plot to
:file:`docs/benchmarks/`. Figures that no run has measured stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks import plots
from benchmarks.floor import FLOOR, WHOLE
from benchmarks.joins import JOINS
from benchmarks.latency import LATENCY, SHOWN
from benchmarks.processes import ENGINE, KINDS
from benchmarks.scaling import SCALING
from benchmarks.soak import SOAK
from benchmarks.startup import STARTUP
from benchmarks.sustained import SUSTAINED
from benchmarks.trigger import TRIGGER
from benchmarks.views import VIEWS

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FOLDER = "benchmarks.md", "benchmarks"
CASES = "cases"
# Findings that are not repeated: their length is a number of batches or a time.
_ONCE = frozenset({FLOOR, SOAK})
_MIB = 1 << 20
_WIDTH = 120

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write(runs: Sequence[Mapping[str, Any]], docs: Path = DOCS) -> None:
    """Write the tables and plots of runs; if several runs have the same finding, the last one wins.

    :param runs: output of ``python -m benchmarks --json``.
    :param docs: a folder that contains :file:`benchmarks.md`.
    """
    found = {name: each for run in runs for name, each in run["findings"].items()}
    texts = {
        name: f"{_machine(run)}\n{_measured(run, name, each)}" for run in runs for name, each in run["findings"].items()
    }
    compared = [run for run in runs if run["cases"]]
    if compared:
        found[CASES] = [case for run in compared for case in run["cases"]]
        texts[CASES] = "\n\n".join(
            f"{machine}\n" + "\n\n".join(_measured(run, CASES, run["cases"]) for run in each)
            for machine, each in groupby(compared, _machine)
        )
    folder = docs / FOLDER
    folder.mkdir(exist_ok=True)
    drawn = {name: plots.PLOTS[name](found[name], folder) for name in found if name in plots.PLOTS}
    page = docs / PAGE

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in found:
            return match[0]
        plotted = (f"![{name}]({FOLDER}/{file})" for file in drawn.get(name, ()))
        return "\n\n".join([f"{match[1].rstrip()}\n{texts[name]}", *plotted]) + f"\n{match[3]}"

    page.write_text(_BLOCK.sub(block, page.read_text(encoding="utf-8")), encoding="utf-8")


def _machine(run: Mapping[str, Any]) -> str:
    """Return when, on which machine and with which versions a run was measured."""
    machine = run["machine"]
    versions = ", ".join(f"{name.capitalize()} {machine[name]}" for name in ("postgres", "spark", "python", "pyarrow"))
    hardware = f"{machine['platform']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"{machine['date']}: {hardware}; {versions}."


def _measured(run: Mapping[str, Any], name: str, found: Any) -> str:
    """Return a table below a line with the load average before the run and the number of repeats."""
    repeats = "" if name in _ONCE else f"; repeats: {run['repeat']}"
    return f"Load average: {run['machine']['load_before']}{repeats}.\n\n{TABLES[name](found)}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table in Markdown; all columns but the first ``texts`` hold numbers."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, rule, *body))


def _spread(figures: Mapping[str, float], digits: int = 0) -> str:
    """Return the median, followed by the least and the greatest figure if these differ."""
    median, least, greatest = (f"{figures[name]:,.{digits}f}" for name in ("median", "min", "max"))
    return median if least == greatest else f"{median} ({least}-{greatest})"


def _cases(found: Sequence[Mapping[str, Any]]) -> str:
    sizes = {each["rows"] for each in found}
    body = []
    for each in found:
        ratios = ({each["peer"]: each["ratio"]} if each["peer"] else {}) | each["others"]
        compared = ", ".join(
            f"{ratio:.2f}x {_peer(each['case'], peer)}" for peer, ratio in ratios.items() if ratio is not None
        )
        body.append([text.replace("copy | copy", "copy \\| copy") for text in (f"`{each['case']}`", compared)])
        body[-1] += [f"{each['rows']:,}"] if len(sizes) > 1 else []
        body[-1].append(_spread(each["rows_per_second"]))
    rows = ["rows"] if len(sizes) > 1 else []
    table = _table(["case", "compared", *rows, "rows/s (min-max)"], body, 2)
    return table if rows else f"Rows: {sizes.pop():,}.\n\n{table}"


def _peer(case: str, peer: str) -> str:
    """Return a peer's name without the part that it shares with the case: its shape, or the case itself."""
    _, comma, shape = case.partition(", ")
    return peer.removeprefix(f"{case}: ").removesuffix(comma + shape)


def _latency(found: Mapping[str, Any]) -> str:
    body = [
        [f"{each['rate']:,}", _spread(each["written"]), *(_spread(each["milliseconds"][name]) for name in SHOWN)]
        for each in found["rates"]
    ]
    head = ["transactions/s", "written/s (min-max)", *(f"{name}, ms" for name in SHOWN)]
    return f"Trigger: {found['trigger']}; {found['seconds']:g} s each.\n\n{_table(head, body, 0)}"


def _floor(found: Mapping[str, Any]) -> str:
    body = [
        [kind, "all" if phase == WHOLE else f"`{phase}`", _spread(figures)]
        for kind, each in found.items()
        for phase, figures in each["phases"].items()
    ]
    return _table(["batch", "phase", "ms (min-max)"], body, 2)


def _sustained(found: Mapping[str, Any]) -> str:
    rates = _table(
        ["", "changes/s", "written/s", "max seconds behind", "max MiB retained", ""],
        [
            [kind, *_load(each)]
            for kind, loads in (("probe", found["probes"]), (f"{found['seconds']:g} s", found["holds"]))
            for each in loads
        ],
    )
    if not found["cpu_per_million"]:
        return rates
    cost = _table(
        ["CPU seconds per million changes", "median (min-max)"],
        [[kind, _spread(found["cpu_per_million"][kind], 1)] for kind in KINDS],
    )
    return f"Highest rate with a lag below {found['bound']:g} s: **{found['rate']:,} changes/s**.\n\n{rates}\n\n{cost}"


def _load(load: Mapping[str, Any]) -> list[str]:
    retained = max(sample["retained"] for sample in load["samples"]) / _MIB
    return [f"{load['rate']:,}", f"{load['written']:,}", f"{load['behind']:.1f}", f"{retained:,.0f}", load["verdict"]]


def _scaling(found: Mapping[str, Any]) -> str:
    body = [
        [
            axis,
            f"{each['x']:,}",
            f"{each['changes']:,}",
            f"{each['log'] / _MIB:,.0f}",
            _spread(each["changes_per_second"]),
            _spread(each["microseconds"], 1),
            _spread(each["cpu_microseconds"], 1),
        ]
        for axis, points in found.items()
        for each in points
    ]
    head = ["axis", "", "changes", "MiB of log", "changes/s (min-max)", "µs per change", "CPU µs per change"]
    return _table(head, body)


def _startup(found: Mapping[str, Any]) -> str:
    names = {"cold_connected": "cold, until the walsender starts", "cold": "cold", "warm": "warm session"}
    body = [[names[kind], _spread(each, 2)] for kind, each in found.items()]
    return _table(["time to the first applied change", "seconds (min-max)"], body)


def _trigger(found: Mapping[str, Any]) -> str:
    names = {
        "rows": "first row of a small pipeline",
        "success": "end of that run",
        "nothing": "end of a run with nothing to do",
        "live": "first change of a stream without end, since its task began",
    }
    body = [[text, _spread(found[kind], 2)] for kind, text in names.items()]
    return _table(["time from the trigger", "seconds (min-max)"], body)


def _views(found: Mapping[str, Any]) -> str:
    cases = _table(["case", "changes/s (min-max)"], [[name, _spread(each)] for name, each in found["cases"].items()])
    single = _table(
        ["rows of the view", "seconds", "lag of the stream (s)"],
        [[f"{each['rows']:,}", f"{each['seconds']:.2f}", f"{each['lag']:.2f}"] for each in found["fan_out"]],
    )
    names = ("ratio_to_mirror", "ratio_to_small", "ratio_to_small_alone", "upkeep_seconds_a_unit")
    to_mirror, to_small, alone, upkeep = (found[name] for name in names)
    text = (
        f"With the view, changes are applied **{to_mirror:.2f}** times as fast as without. The same changes of tables"
        f" ten times as large take {to_small:.2f} times the time, without the view {alone:.2f} times. The upkeep of the"
        f" view takes {upkeep:.2f} s a unit, `REFRESH MATERIALIZED VIEW` {_spread(found['refresh'], 2)} s."
    )
    return f"{fill(text, _WIDTH)}\n\n{cases}\n\n{single}"


def _joins(found: Mapping[str, Any]) -> str:
    upkeep = _table(
        ["the wide table by", "seconds a unit"],
        [[f"`{name}`", _spread(each, 2)] for name, each in found["upkeep_seconds_a_unit"].items()],
    )
    shown = {
        "copied (s)": "copied_seconds",
        "changes/s": "changes_per_second",
        "recovered (s)": "recovered_seconds",
        "until it reads (s)": "connected_seconds",
        "rows left wrong": "wrong_rows",
        "state (MiB)": "state_mib",
    }
    followed = _table(
        ["", *shown],
        [
            [name, *(_spread(each[key], int(key.endswith(("_seconds", "_mib")))) for key in shown.values())]
            for name, each in found["followed"].items()
        ],
    )
    left_out = "".join(f"{text}.\n\n" for text in found["left_out"])
    plain = _spread(found["plain_seconds_a_unit"], 2)
    return f"{left_out}A unit without the wide table takes {plain} s as SQL.\n\n{upkeep}\n\n{followed}"


def _soak(found: Mapping[str, Any]) -> str:
    steady = found["samples"][len(found["samples"]) // 2 :]
    body = []
    for name in ("retained", "lag", *ENGINE):
        values = sorted(sample[name] / _MIB for sample in steady)
        figures = (values[0], values[len(values) // 2], values[-1])
        body.append([name, *(f"{value:,.1f}" for value in figures)])
    verdict = "; ".join(found["faults"]) or "within all bounds"
    table = _table(["MiB, second half", "min", "median", "max"], body)
    return f"{found['changes']:,} changes in {found['seconds']:g} s, {verdict}.\n\n{table}"


def _parsing(found: Mapping[str, Any]) -> str:
    head = ["files", "Dags", "modules loaded", "first parse", "second parse"]
    counts = [str(found[name]) for name in ("files", "dags", "modules")]
    times = [f"{1000 * found[name]:.0f} ms" for name in ("first", "again")]
    return _table(head, [[*counts, *times]], 0)


TABLES: Mapping[str, Callable[[Any], str]] = {
    CASES: _cases,
    LATENCY: _latency,
    FLOOR: _floor,
    SUSTAINED: _sustained,
    SCALING: _scaling,
    STARTUP: _startup,
    TRIGGER: _trigger,
    VIEWS: _views,
    JOINS: _joins,
    SOAK: _soak,
    "parsing": _parsing,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the documentation's figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what `python -m benchmarks --json` has written")
    parser.add_argument("--docs", type=Path, default=DOCS, help="a folder with benchmarks.md")
    options = parser.parse_args(arguments)
    write([json.loads(file.read_text(encoding="utf-8")) for file in options.files], options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
