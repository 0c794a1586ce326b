"""What the Dag processor pays to parse the Dags, again and again.

It forks a process for every parse of a file, in which Airflow is loaded already and this provider is not. So each
figure comes from interpreters of their own: the CPU time of parsing all files of :file:`dags` after Airflow's modules
have been imported, and that of parsing them once more, which is what the Dags cost beyond the provider's modules.
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
    """Medians of some interpreters.

    :param files: how many files there are.
    :param dags: how many Dags they define.
    :param modules: that were loaded for them, Airflow's own among them.
    :param first: seconds of CPU to parse all files in a fresh interpreter.
    :param again: seconds of CPU to parse them once more in the same.
    """

    files: int
    dags: int
    modules: int
    first: float
    again: float

    name: ClassVar[str] = PARSING
    faults: ClassVar[tuple[str, ...]] = ()

    def as_text(self) -> str:
        """A sentence a figure."""
        return (
            f"{self.files} files, {self.dags} Dags, {self.modules} modules loaded for them\n"
            f"first parse in a fresh interpreter  {self.first * 1000:.0f} ms of CPU\n"
            f"parsed again in the same            {self.again * 1000:.0f} ms of CPU"
        )

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


def measure(repeat: int) -> Parse:
    """Parse the Dags in interpreters of their own, one after the other."""
    with tempfile.TemporaryDirectory(prefix="cdc-parse-") as home:
        runs = [_parse(home) for _ in range(repeat + 1)][1:]  # the first one compiles
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
