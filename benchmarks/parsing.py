"""Measures what it costs the Dag processor to parse the Dags repeatedly.

The Dag processor forks a process for every parse of a file. That process has loaded Airflow, but not this provider. So
each figure comes from its own interpreter: the CPU time of parsing all files of :file:`dags` after importing Airflow's
modules, and that of parsing them once more. The second parse shows what the Dags cost without the provider's modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.report import WrongResult

PARSING = "parsing"
DAGS = Path(__file__).parents[1] / "dags"

_PROGRAM = """
import json, sys, time
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG, Asset, BaseHook, BaseOperator, BaseSensorOperator, Param, TaskGroup, TriggerRule, task

def parse():
    start = time.process_time()
    bag = DagBag(sys.argv[1])
    return time.process_time() - start, bag

before = set(sys.modules)
first, bag = parse()
loaded = len(set(sys.modules) - before)
again, _ = parse()
print(json.dumps({
    "dags": len(bag.dags), "errors": list(bag.import_errors.values()), "modules": loaded, "first": first, "again": again
}))
"""


@dataclass(frozen=True)
class Parse:
    """Medians over some interpreters.

    :param files: number of files.
    :param dags: number of Dags that they define.
    :param modules: number of modules loaded for them, including Airflow's.
    :param first: seconds of CPU to parse all files in a fresh interpreter.
    :param again: seconds of CPU to parse them once more in the same interpreter.
    """

    files: int
    dags: int
    modules: int
    first: float
    again: float

    name: ClassVar[str] = PARSING
    faults: ClassVar[tuple[str, ...]] = ()

    def as_text(self) -> str:
        """Return a line per figure."""
        return (
            f"{self.files} files, {self.dags} Dags, {self.modules} modules loaded for them\n"
            f"first parse in a fresh interpreter  {self.first * 1000:.0f} ms of CPU\n"
            f"parsed again in the same            {self.again * 1000:.0f} ms of CPU"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def measure(repeat: int) -> Parse:
    """Parse the Dags in separate interpreters, one after the other."""
    with tempfile.TemporaryDirectory(prefix="cdc-parse-") as home:
        runs = [_parse(home) for _ in range(repeat + 1)][1:]  # the first run compiles the modules
    return Parse(
        files=len(list(DAGS.glob("*.py"))),
        dags=int(runs[0]["dags"]),
        modules=int(runs[0]["modules"]),
        first=median(run["first"] for run in runs),
        again=median(run["again"] for run in runs),
    )


def _parse(home: str) -> dict[str, int | float]:
    settings = {"AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(DAGS)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise WrongResult(f"the Dags were not parsed: {done.stderr[-2000:]}")
    figures: dict[str, int | float] = json.loads(done.stdout.splitlines()[-1])
    if figures.pop("errors"):
        raise WrongResult(f"the Dags have import errors: {done.stdout}")
    return figures
