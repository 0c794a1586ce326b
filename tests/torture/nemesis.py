"""The nemesis: breaks processes, servers, connections and files, in the steps that the seed determines."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import psycopg

import airflow_cdc_provider
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import STALE_SECONDS, read_heartbeats
from local_servers.postgres import PostgresServer
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.threads import Stoppable
from tests.torture.driver import END_SECONDS, Driver
from tests.torture.history import Truth
from tests.torture.observer import Observer
from tests.torture.schema import SPACE, Table
from tests.torture.source import Source

_T = TypeVar("_T")

_PATIENCE = 20.0
"""Seconds that a step waits for progress at most, because a pipeline without progress may need the next step."""
_CALM = 20
"""Marks of progress after which a pipeline is left alone for a while, so that it reaches its stream."""
_SLOT_SECONDS = 240.0
"""Seconds in which a stream acknowledges enough for its slot to reach a standby, even on a slow machine."""
_TASK_SECONDS = 90.0
"""Seconds in which a task of Airflow reaches Spark, even on a slow machine."""
_HALTS = (0.5, 3.0, 7.0, STALE_SECONDS + 5)
"""Seconds: short, about a server's timeout for an answer, longer, and until a heartbeat counts as dead."""
# Failpoints that a pipeline passes repeatedly without further action.
_FAILPOINTS = r'failpoint\("((?:before|after|in)-(?:chunk|batch|spark|epoch|acknowledgement|ledger)[a-z-]*)"\)'


@dataclass(frozen=True)
class Step:
    """A step of the schedule.

    :param marks: number of signs of progress to wait for first.
    :param delay: seconds to wait then.
    :param seconds: duration for which a halted process stays halted.
    :param pick: chooses among the possible targets of the action.
    """

    action: str
    marks: int
    delay: float
    seconds: float
    pick: int


ACTIONS = {
    "kill everything": 10,
    "kill the driver": 6,
    "kill the JVM": 6,
    "kill the Python workers": 8,
    "kill the reader of the slot": 8,
    "stop the job": 4,
    "restart the source": 4,
    "stop the source immediately": 6,
    "kill the source": 3,
    "restart the target": 4,
    "stop the target immediately": 6,
    "kill the target": 3,
    "halt the driver": 3,
    "halt the reader of the slot": 3,
    "halt the walsender": 5,
    "halt the source": 3,
    "halt the target": 3,
    "cut connections to the source": 8,
    "cut connections to the target": 8,
    "run as a task of Airflow": 3,
    "kill the task of Airflow": 5,
    "kill the supervisor of the task of Airflow": 4,
    "start a second driver": 5,
    "fail over to a standby": 4,
    "take over": 6,
    "start over": 3,
    "delete the checkpoint": 4,
    "delete the state": 4,
    "read a table again": 10,
    "read rows again": 6,
    "arm a failpoint": 12,
}


def schedule(seed: int) -> Iterator[Step]:
    """Yield the endless steps of a seed: each action once, in random order, then by weights."""
    chance = random.Random(f"{seed}/nemesis")
    names = list(ACTIONS)
    first = chance.sample(names, len(names))
    for action in itertools.chain(first, iter(lambda: chance.choices(names, list(ACTIONS.values()))[0], None)):
        yield Step(
            action,
            chance.choice((0, 0, 1, 1, 2, 5, _CALM)),
            round(chance.uniform(0.0, 3.0), 1),
            chance.choice(_HALTS),
            chance.randrange(1 << 30),
        )


class Nemesis(Stoppable):
    """Carries out the schedule, until stopped.

    :param say: called with each step.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        source: Source,
        target: PostgresServer,
        pipeline: PipelineUnderTest,
        driver: Driver,
        observer: Observer,
        truth: Truth,
        tables: list[Table],
        say: Callable[[str], None],
    ) -> None:
        super().__init__("nemesis")
        self._steps = steps
        self._source, self._target, self._truth = source, target, truth
        self._pipeline, self._driver, self._observer = pipeline, driver, observer
        self._tables = tables
        self._say = say
        self._vain = False
        self.done = Counter[str]()
        self.wrong: list[str] = []

    def work(self) -> None:
        for step in self._steps:
            self._await(step)
            if self._halt.is_set():
                return
            self._say(f"nemesis: {step.action} ({step.marks} marks, {step.delay:g} s, {step.seconds:g} s)")
            self._vain = False
            self._act(step)
            if self._vain:
                self._say("nemesis: skipped, nothing to act on")
            else:
                self.done[step.action] += 1

    def _await(self, step: Step) -> None:
        wanted = self._observer.progress + step.marks
        patience = int(_PATIENCE / 0.2) * (4 if step.marks == _CALM else 1)
        while self._observer.progress < wanted and patience and not self._halt.wait(0.2):
            patience -= 1
        self._halt.wait(step.delay)

    def _act(self, step: Step) -> None:
        verb, _, rest = step.action.partition(" ")
        servers = {"the source": self._source.primary, "the target": self._target}
        server = next((servers[name] for name in servers if rest.startswith(name)), None)
        if step.action == "kill everything":
            self._driver.kill()
        elif server is not None and verb in ("restart", "stop", "kill"):
            self._break(server, verb)
        elif server is not None and verb == "halt":
            with _halted(_family(server)):
                self._halt.wait(step.seconds)
        elif step.action == "halt the walsender":
            with _halted(self._await_some(self._walsenders)):
                self._halt.wait(step.seconds)
        elif verb == "halt":
            part = "driver" if rest == "the driver" else "reader"
            with _halted(self._await_some(lambda: self._driver.processes(part))):
                self._halt.wait(step.seconds)
        elif verb == "cut":
            self._cut(self._pipeline.databases.source if "source" in rest else self._pipeline.databases.target, step)
        elif step.action == "stop the job":
            self._driver.expect_stop()
            self._pipeline.start("stop").wait()
        elif step.action == "run as a task of Airflow":
            self._driver.become_task()
        elif rest.endswith("of Airflow"):
            self._kill_task(step, "supervisor" if "supervisor" in rest else "task")
        elif verb == "kill":
            self._kill({"the driver": "driver", "the JVM": "jvm", "the Python workers": "worker"}.get(rest, "reader"))
        elif step.action == "start a second driver":
            self._second()
        elif verb == "fail":
            self._fail_over(step)
        elif step.action == "take over":
            self._driver.take_over()
        elif step.action == "start over":
            self._driver.start_over()
        elif verb == "delete":
            self._forget(self._pipeline.state / "checkpoint" if "checkpoint" in rest else self._pipeline.state)
        elif verb == "read":
            self._reread(step, "rows" in rest)
        else:
            self._driver.failpoint = self._failpoint(step)
            self._driver.kill()

    def _await_some(self, find: Callable[[], list[_T]]) -> list[_T]:
        """Return the targets of a step, which may be about to start; without any, the step is skipped."""
        found: list[_T] = []

        def some() -> bool:
            found[:] = find()
            return bool(found) or self._halt.is_set()

        await_condition(some, _PATIENCE, interval=0.2)
        self._vain = not found
        return found

    def _kill(self, part: str) -> None:
        processes = self._await_some(lambda: self._driver.processes(part))
        if processes:
            self._driver.expect_kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _kill_task(self, step: Step, part: str) -> None:
        """Kill a task of Airflow, or its supervisor, while its job is running."""
        self._driver.become_task()
        await_condition(lambda: self._halt.is_set() or self._driver.beats(), _TASK_SECONDS, interval=0.5)
        self._halt.wait(step.seconds)
        self._vain = not self._driver.kill_task(part)

    @staticmethod
    def _break(server: PostgresServer, verb: str) -> None:
        if verb == "kill":
            server.kill()
        else:
            server.stop("fast" if verb == "restart" else "immediate")
        server.start()

    def _walsenders(self) -> list[psutil.Process]:
        with psycopg.connect(self._source.primary.dsn(), autocommit=True) as connection:
            found = connection.execute("SELECT pid FROM pg_stat_replication").fetchall()
        return [psutil.Process(pid) for (pid,) in found if psutil.pid_exists(pid)]

    def _cut(self, dsn: str, step: Step) -> None:
        """End one or all of the pipeline's sessions."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'airflow-cdc%' ORDER BY backend_start"
            found = self._await_some(lambda: [pid for (pid,) in connection.execute(query)])
            chosen = found if step.pick % 3 == 0 else found[step.pick % len(found) :][:1] if found else []
            for pid in chosen:
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])

    def _fail_over(self, step: Step) -> None:
        """Move the source to another address and another timeline, usually without a clean shutdown."""
        # The standby gets a slot once the stream has acknowledged changes. A server does not always live that long.
        patience = (2.0, _SLOT_SECONDS)[step.pick % 2]
        slots = {
            "torture_truth": (SECONDS, self._truth.advance),
            self._pipeline.pipeline.source.slot: (patience, lambda: None),
        }
        self._driver.source_moves()
        self._source.fail_over(step.pick % 3 == 0, slots)

    def _second(self) -> None:
        """Check that a second driver is refused while one is running."""
        drivers, ends = self._driver.processes("driver"), sum(self._driver.ends.values())
        beats = read_heartbeats(State(self._pipeline.pipeline.state))
        alive = any(beat.alive and beat.owner.pid == driver.pid for beat in beats for driver in drivers)
        with self._driver.rival():
            outcome = self._pipeline.start("run", "--json").wait(END_SECONDS)
        if outcome.code == 0 and alive and sum(self._driver.ends.values()) == ends:
            self.wrong.append(
                f"a second driver ran while the first was running:\n{outcome.stdout}\n{outcome.stderr[-2000:]}"
            )

    def _forget(self, path: Path) -> None:
        self._driver.kill()
        shutil.rmtree(path, ignore_errors=True)

    def _reread(self, step: Step, rows: bool) -> None:
        table = self._tables[step.pick % len(self._tables)]
        low = step.pick % SPACE
        where = ("--where", f"n BETWEEN {low} AND {low + 50}") if rows else ()
        with self._driver.rival():
            # Refused while the snapshot is not finished, or done by the command itself if no stream is running.
            self._pipeline.start("resnapshot", "--table", table.label, *where).wait(END_SECONDS)

    @staticmethod
    def _failpoint(step: Step) -> str:
        sources = Path(airflow_cdc_provider.__file__).parent.rglob("*.py")
        names = sorted({name for path in sources for name in re.findall(_FAILPOINTS, path.read_text())})
        action = ("kill", "kill", "error")[step.pick % 3]
        return f"{names[step.pick % len(names)]}:{action}:{1 + step.pick % 4}"


def _family(server: PostgresServer) -> list[psutil.Process]:
    """Return all processes of a server, the parent first: it must not start others, or see them stop."""
    (pid,) = [int((server.data_directory / "postmaster.pid").read_text().splitlines()[0])]
    postmaster = psutil.Process(pid)
    return [postmaster, *postmaster.children(recursive=True)]


@contextmanager
def _halted(processes: list[psutil.Process]) -> Iterator[None]:
    """Halt processes for the duration of the block."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
