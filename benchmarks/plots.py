"""Draws plots of the figures, as SVG; the only module that needs the extra ``bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.floor import FLOOR, WHOLE
from benchmarks.latency import LATENCY
from benchmarks.processes import ENGINE, KINDS
from benchmarks.scaling import SCALING
from benchmarks.sustained import SUSTAINED

_MIB = 1 << 20
# The same figures yield the same bytes: no date, and fixed ids.
_SETTINGS = {"svg.hashsalt": "benchmarks", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}
_METADATA = {"Date": None, "Creator": None}


@contextmanager
def _plot(file: Path, rows: int = 1, columns: int = 1) -> Iterator[list[Axes]]:
    """Yield the axes of a figure, and write it at the end."""
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield list(axes.flat)
        figure.savefig(file, format="svg", metadata=_METADATA)


def _bars(axes: Axes, names: Sequence[str], spreads: Sequence[Mapping[str, float]]) -> None:
    """Draw horizontal bars of medians with error bars from the minimum to the maximum, the first on top."""
    medians = [each["median"] for each in spreads]
    around = [[each["median"] - each["min"] for each in spreads], [each["max"] - each["median"] for each in spreads]]
    axes.barh(range(len(names)), medians, xerr=around, capsize=3, color="tab:blue")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _cases(found: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    with _plot(folder / "throughput.svg") as (axes,):
        axes.figure.set_size_inches(7.0, 0.8 + 0.35 * len(found))
        _bars(axes, [each["case"] for each in found], [each["rows_per_second"] for each in found])
        axes.set_xlabel("rows per second")
    return ["throughput.svg"]


def _latency(found: Mapping[str, Any], folder: Path) -> list[str]:
    with _plot(folder / "latency.svg", 1, 2) as (shares, marks):
        for i, each in enumerate(found["rates"]):
            for window in each["windows"]:
                first = window is each["windows"][0]
                shares.plot(
                    window["percentiles"],
                    range(101),
                    color=f"C{i}",
                    linewidth=1,
                    label=f"{each['rate']:,} transactions/s" if first else None,
                )
        shares.set(xlabel="milliseconds from commit to visible", ylabel="% of rows", xscale="log")
        shares.xaxis.set_minor_formatter(NullFormatter())  # otherwise they would overlap
        shares.legend()
        rates = [each["rate"] for each in found["rates"]]
        for name in found["rates"][0]["milliseconds"]:
            _line(marks, rates, [each["milliseconds"][name] for each in found["rates"]], name)
        marks.set(xlabel="transactions per second", ylabel="milliseconds", xscale="log", yscale="log")
        marks.legend()
    return ["latency.svg"]


def _line(axes: Axes, x: Sequence[float], spreads: Sequence[Mapping[str, float]], label: str | None = None) -> None:
    """Draw a line of medians with error bars from the minimum to the maximum."""
    medians = [each["median"] for each in spreads]
    around = [[each["median"] - each["min"] for each in spreads], [each["max"] - each["median"] for each in spreads]]
    axes.errorbar(x, medians, yerr=around, marker="o", capsize=3, label=label)


def _floor(found: Mapping[str, Any], folder: Path) -> list[str]:
    with _plot(folder / "floor.svg") as (axes,):
        axes.figure.set_size_inches(7.0, 2.2)
        phases = list(dict.fromkeys(phase for each in found.values() for phase in each["phases"] if phase != WHOLE))
        for row, each in enumerate(found.values()):
            left = 0.0
            for i, phase in enumerate(phases):
                width = each["phases"].get(phase, {"median": 0.0})["median"]
                axes.barh(row, width, left=left, color=f"C{i}", label=phase if row == 0 else None)
                left += width
        axes.set_yticks(range(len(found)), list(found))
        axes.set_xlabel("milliseconds, medians")
        axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return ["floor.svg"]


def _sustained(found: Mapping[str, Any], folder: Path) -> list[str]:
    if not found["holds"]:
        return []
    last = found["holds"][-1]
    at = [sample["at"] for sample in last["samples"]]
    with _plot(folder / "sustained.svg", 2, 2) as (behind, retained, memory, cost):
        behind.plot(at, [sample["behind"] for sample in last["samples"]])
        behind.axhline(found["bound"], color="tab:red", linestyle="--", linewidth=1)
        behind.set(title=f"Behind at {last['rate']:,} changes/s", ylabel="seconds", xlabel="seconds", ylim=(0, None))
        for name in ("retained", "lag"):
            retained.plot(at, [sample[name] / _MIB for sample in last["samples"]], label=name)
        retained.set(title="Log", ylabel="MiB", xlabel="seconds", ylim=(0, None))
        for name in ENGINE:
            memory.plot(at, [sample[name] / _MIB for sample in last["samples"]], label=name)
        memory.set(title="Resident memory", ylabel="MiB", xlabel="seconds", ylim=(0, None))
        retained.legend()
        memory.legend()
        if found["cpu_per_million"]:
            _bars(cost, KINDS, [found["cpu_per_million"][kind] for kind in KINDS])
        cost.set(title="CPU", xlabel="seconds per million changes")
    return ["sustained.svg"]


def _scaling(found: Mapping[str, Any], folder: Path) -> list[str]:
    with _plot(folder / "scaling.svg", 1, len(found)) as each_axis:
        for axes, (name, points) in zip(each_axis, found.items(), strict=True):
            x = [point["x"] for point in points]
            _line(axes, x, [point["microseconds"] for point in points], "time")
            _line(axes, x, [point["cpu_microseconds"] for point in points], "CPU")
            axes.set(title=name, xscale="log", ylabel="µs per change", ylim=(0, None))
            axes.set_xticks(x, [f"{each:,}" for each in x])
            axes.minorticks_off()
            axes.legend()
    return ["scaling.svg"]


PLOTS: Mapping[str, Callable[[Any, Path], list[str]]] = {
    "cases": _cases,
    LATENCY: _latency,
    FLOOR: _floor,
    SUSTAINED: _sustained,
    SCALING: _scaling,
}
"""Functions that draw what a case found and return the names of the files."""
