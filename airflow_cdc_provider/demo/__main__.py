"""The demo: a shop is copied from a Postgres server to another store while its customers go on buying.

``python -m airflow_cdc_provider.demo`` starts both, fills a million rows, lets
writers change them, and runs the Dag ``cdc_pipeline`` in a real Airflow, by its
REST API: snapshot, stream, comparison. It succeeds only if both sides are equal
at the end, the run succeeded, and the slot let go of the source's log.
Everything it starts ends with it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from airflow_cdc_provider.demo import shop
from airflow_cdc_provider.demo.airflow import AirflowStack
from airflow_cdc_provider.demo.client import FINAL_STATES
from airflow_cdc_provider.demo.servers import await_condition
from airflow_cdc_provider.demo.show import Course, Moment, Outcome, Screen, summary
from airflow_cdc_provider.demo.stage import DAG, DemoFailed, set_stage, work_directory
from airflow_cdc_provider.demo.warehouse import TITLES, WAREHOUSES
from airflow_cdc_provider.engine import commands, slot
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import CdcError
from airflow_cdc_provider.engine.lsn import format_lsn
from airflow_cdc_provider.engine.state import State, read_heartbeats
from airflow_cdc_provider.engine.submission import read_all

GROUPS = 2

TRANSACTIONS_PER_SECOND = 300.0

LOOK_SECONDS = 2.0
LIVE_SECONDS = 20.0
STEP_SECONDS = 600.0
LOG_LINES = 60

INTRODUCTION = """\
A shop of a million rows is copied from Postgres to {sink} while its customers go on buying:
a Dag in a real Airflow takes a snapshot without locks and follows the write-ahead log, both as Spark jobs.
Then every row is compared. It takes two to seven minutes, and all that is started here is stopped at the end."""


@dataclass(frozen=True)
class DagRun:
    """The run of the Dag, and all that is looked at while it goes on."""

    airflow: AirflowStack
    pipeline: Pipeline
    writers: shop.Writers
    screen: Screen
    run_id: str

    def look(self) -> Moment:
        """See where everything is, and show it."""
        moment = Moment(
            status=commands.status(self.pipeline),
            run=self.airflow.client.run_state(DAG, self.run_id),
            tasks=self.airflow.client.task_states(DAG, self.run_id),
            transactions=self.writers.transactions,
        )
        self.screen.show(moment)
        return moment

    def until(self, what: str, holds: Callable[[Moment], bool]) -> list[Moment]:
        """Look until something holds; what was seen meanwhile, of which the last has it.

        :raises DemoFailed: when the run ends before, or time is up.
        """
        seen: list[Moment] = []
        reached = False

        def over() -> bool:
            nonlocal reached
            seen.append(self.look())
            reached = holds(seen[-1])
            return reached or seen[-1].run in FINAL_STATES

        in_time = await_condition(over, STEP_SECONDS, LOOK_SECONDS)
        if reached:
            return seen
        why = f"the Dag run ended as {seen[-1].run}" if in_time else f"{STEP_SECONDS:.0f} seconds have passed"
        raise DemoFailed(f"Waiting for {what}: {why}.", self.explain())

    def explain(self) -> str:
        """What the engine and the tasks that failed have to say."""
        error = commands.status(self.pipeline)["last_error"]
        logs = self.airflow.client.failures(DAG, self.run_id).splitlines()
        said = [f"{error['message']}. {error['solution']}"] if error else []
        return "\n".join([*said, *logs[-LOG_LINES:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if it succeeded."""
    options = _parser().parse_args(arguments)
    # Whatever ends us, the processes that we started are to be stopped in order.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    screen = Screen(sys.stdout)
    try:
        with work_directory(options.directory) as directory:
            return demonstrate(directory, screen, options.sink, options.keep)
    except CdcError as error:
        tell_failure(screen, error)
    except KeyboardInterrupt:
        screen.say("Interrupted; everything is stopped.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_cdc_provider.demo", description=INTRODUCTION.format(sink="another store")
    )
    parser.add_argument("--sink", choices=WAREHOUSES, default="postgres", help="kind of the other store")
    parser.add_argument("--keep", action="store_true", help="leave everything running at the end, until Ctrl-C")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="work in this new or empty directory, and leave it behind"
    )
    return parser


def demonstrate(directory: Path, screen: Screen, sink: str, keep: bool) -> int:
    """Start everything, run the Dag, judge the result, stop everything."""
    screen.print(f"{INTRODUCTION.format(sink=TITLES[sink])}\n")
    with ExitStack() as started:
        run = begin(started, directory, screen, sink)
        try:
            succeeded = judge(run, follow(run))
        except CdcError as error:
            if not keep:
                raise
            tell_failure(screen, error)
            succeeded = False
        if keep:
            keep_running(run)
    return 0 if succeeded else 1


def begin(started: ExitStack, directory: Path, screen: Screen, sink: str) -> DagRun:
    """Set the stage, let the writers begin, and trigger the Dag."""
    stage = set_stage(started, directory, screen.say, sink)
    screen.print(f"\n{stage.file}:\n\n{stage.file.read_text(encoding='utf-8')}")
    writers = started.enter_context(shop.Writers(stage.source, TRANSACTIONS_PER_SECOND))
    screen.say(f"Customers buy from here on: {TRANSACTIONS_PER_SECOND:.0f} transactions a second.")
    run_id = stage.airflow.client.trigger(DAG, {"pipeline": str(stage.file), "until": "stopped", "groups": GROUPS})
    screen.say(f"The Dag {DAG} is triggered: preflight, provision, plan, snapshot, stream, verify.")
    return DagRun(stage.airflow, stage.pipeline, writers, screen, run_id)


def follow(run: DagRun) -> Course:
    """Follow the run to its end."""
    say = run.screen.say
    *_, start = run.until("the slot", lambda moment: moment.applied > 0 and moment.restart > 0)
    say(f"The slot is made, its restart_lsn is {format_lsn(start.restart)}. Spark copies chunks.")
    *_, copied = run.until("the snapshot", lambda moment: moment.copied)
    say(f"The snapshot is finished: {copied.chunks[1]} chunks. The stream applies what was changed meanwhile.")
    run.until("a consistent copy", lambda moment: moment.live)
    say("The copy is consistent: from here on it is, at any time, what the source was a moment before.")
    live_until = run.screen.seconds + LIVE_SECONDS
    live = run.until("some time live", lambda moment: run.screen.seconds >= live_until)
    run.writers.stop()
    with connected(run.pipeline.source.dsn) as source:
        marker = slot.emit_marker(source, "demo")
    say(f"The writers have stopped; all they did lies before {format_lsn(marker)} in the log.")
    run.until(f"the copy to reach {format_lsn(marker)}", lambda moment: moment.applied >= marker)
    say("The copy has caught up.")
    *_, moved = run.until("restart_lsn to move", lambda moment: moment.restart > start.restart)
    say(f"The slot's restart_lsn has moved to {format_lsn(moved.restart)}: the source may remove its log up to there.")
    # A stream that Airflow is about to start again is asked once it lives.
    run.until("the stream to listen", lambda moment: bool(commands.stop(run.pipeline)["asked"]))
    say("The stream is asked to stop; the run goes on to verify.")
    *_, end = run.until("the end of the run", lambda moment: moment.run in FINAL_STATES)
    return Course(start, live, end)


def judge(run: DagRun, course: Course) -> bool:
    """Compare source and target once more, print the result, and tell whether all is as it should be."""
    run.screen.say(f"The Dag run ended as {course.end.run}. Every row is compared once more.")
    verified = commands.verify(run.pipeline)
    state = State(run.pipeline.state)
    # The heartbeats of the snapshot are forgotten when the stream begins.
    jobs: dict[str, Mapping[str, Any]] = {job.part: job.result for job in read_all(state) if job.result is not None}
    jobs |= {beat.part: beat.progress for beat in read_heartbeats(state)}
    outcome = Outcome(replace(course, end=run.look()), verified, jobs, run.screen.seconds)
    run.screen.print(f"\n{summary(outcome)}\n")
    for problem in outcome.problems:
        run.screen.print(f"FAILED: {problem}.")
    if outcome.problems:
        run.screen.print(run.explain())
    else:
        run.screen.print("Equal: every row of the source is in the target, and no other.")
    return not outcome.problems


def tell_failure(screen: Screen, error: CdcError) -> None:
    """Print what went wrong and what to do about it."""
    screen.say(f"FAILED. {error.message}\n{error.solution}")


def keep_running(run: DagRun) -> None:
    """Leave everything up until the user has seen enough."""
    servers = f"source   {run.pipeline.source.dsn}\ntarget   {run.pipeline.sink.place}"
    run.screen.print(f"\nAirflow  {run.airflow.base_url}\n{servers}\n\nAll of it runs until you press Ctrl-C.")
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
