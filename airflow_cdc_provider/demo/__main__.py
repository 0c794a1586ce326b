"""The demo: a shop is copied from one Postgres server to another while its customers go on buying.

``python -m airflow_cdc_provider.demo`` starts two servers, fills a million rows,
lets writers change them, and runs the Dag ``cdc_pipeline`` in a real Airflow, by
its REST API: snapshot, stream, comparison. It succeeds only if both sides are
equal at the end, the run succeeded, and the slot let go of the source's log.
Everything it starts ends with it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

from airflow_cdc_provider.demo import shop
from airflow_cdc_provider.demo.airflow import FINAL_STATES, AirflowStack
from airflow_cdc_provider.demo.servers import PostgresServer, await_condition
from airflow_cdc_provider.demo.show import Course, Moment, Outcome, Screen, summary
from airflow_cdc_provider.engine import commands, slot
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.errors import CdcError
from airflow_cdc_provider.engine.lsn import format_lsn
from airflow_cdc_provider.engine.state import State, read_heartbeats

DAGS = Path(__file__).parents[2] / "dags"
DAG = "cdc_pipeline"
GROUPS = 2

POSTGRES = "16"
SETTINGS: Mapping[str, str] = {"shared_buffers": "256MB", "max_wal_size": "4GB", "checkpoint_timeout": "15min"}
TRANSACTIONS_PER_SECOND = 300.0

LOOK_SECONDS = 2.0
LIVE_SECONDS = 20.0
STEP_SECONDS = 600.0
LOG_LINES = 60

INTRODUCTION = """\
A shop of a million rows is copied from one Postgres server to another while its customers go on buying:
a Dag in a real Airflow takes a snapshot without locks and follows the write-ahead log, both as Spark jobs.
Then every row is compared. It takes two to five minutes, and all that is started here is stopped at the end."""

PIPELINE = """\
pipeline: shop
source:
  conn_id: shop_source
  tables: ["shop.*"]
sink:
  conn_id: shop_target
  mode: mirror
state: {state}
snapshot: {{chunk_rows: 50000}}
stream: {{trigger: 1 second, heartbeat: 5 seconds}}
"""


class DemoFailed(CdcError):
    """The demo did not get where it should."""


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
            run=self.airflow.run_state(DAG, self.run_id),
            tasks=self.airflow.task_states(DAG, self.run_id),
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
        logs = self.airflow.failures(DAG, self.run_id).splitlines()
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
            return demonstrate(directory, screen, options.keep)
    except CdcError as error:
        tell_failure(screen, error)
    except KeyboardInterrupt:
        screen.say("Interrupted; everything is stopped.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m airflow_cdc_provider.demo", description=INTRODUCTION)
    parser.add_argument("--keep", action="store_true", help="leave everything running at the end, until Ctrl-C")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="work in this new or empty directory, and leave it behind"
    )
    return parser


@contextmanager
def work_directory(chosen: Path | None) -> Iterator[Path]:
    """The directory of everything: the user's, which stays, or a temporary one."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            raise DemoFailed(f"{chosen} is not empty.", "Choose a directory that is new or empty.")
        yield chosen.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="cdc-demo-"))
    # Root starts Postgres as another user, who has to get through.
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def demonstrate(directory: Path, screen: Screen, keep: bool) -> int:
    """Start everything, run the Dag, judge the result, stop everything."""
    if not DAGS.is_dir():
        raise DemoFailed(f"There is no {DAGS}.", "Run the demo in a clone of the repository, with `make demo`.")
    screen.print(f"{INTRODUCTION}\n")
    with ExitStack() as started:
        run = begin(started, directory, screen)
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


def begin(started: ExitStack, directory: Path, screen: Screen) -> DagRun:
    """Start servers, Airflow and writers, and trigger the Dag."""
    source = start_server(started, directory / "source", "shop")
    target = start_server(started, directory / "target", "warehouse")
    screen.say(f"Two Postgres {POSTGRES} servers run: source on port {source.port}, target on port {target.port}.")
    databases = {
        "AIRFLOW_CONN_SHOP_SOURCE": source.dsn("shop"),
        "AIRFLOW_CONN_SHOP_TARGET": target.dsn("warehouse"),
    }
    spark = {"AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"})}
    stack = AirflowStack(directory / "airflow", DAGS, databases | spark | scratch(started))
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_shop, source.dsn("shop"), screen)
        airflow = started.enter_context(stack)
        loading.result()
    screen.say(f"Airflow runs at {airflow.base_url} (no login needed).")
    path = write_pipeline(directory)
    screen.print(f"\n{path}:\n\n{path.read_text(encoding='utf-8')}")
    writers = started.enter_context(shop.Writers(source.dsn("shop"), TRANSACTIONS_PER_SECOND))
    screen.say(f"Customers buy from here on: {TRANSACTIONS_PER_SECOND:.0f} transactions a second.")
    run_id = airflow.trigger(DAG, {"pipeline": str(path), "until": "stopped", "groups": GROUPS})
    screen.say(f"The Dag {DAG} is triggered: preflight, provision, plan, snapshot, stream, verify.")
    return DagRun(airflow, Pipeline.load(path, databases), writers, screen, run_id)


def scratch(started: ExitStack) -> dict[str, str]:
    """Variables that send temporary files where they are removed: a Spark job that is killed leaves its own behind.

    Not below a directory that the user chose, since the path of a socket may have some hundred characters only.
    """
    path = started.enter_context(tempfile.TemporaryDirectory(prefix="cdc-demo-", ignore_cleanup_errors=True))
    return {"TMPDIR": path, "SPARK_LOCAL_DIRS": path, "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={path}"}


def start_server(started: ExitStack, directory: Path, database: str) -> PostgresServer:
    """A server with one empty database, stopped at the end."""
    server = PostgresServer.create(directory, POSTGRES, SETTINGS)
    started.callback(server.stop)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
    return server


def load_shop(dsn: str, screen: Screen) -> None:
    """Create and fill the shop's tables."""
    with psycopg.connect(dsn) as connection:
        shop.create_schema(connection)
    screen.say(f"The shop is loaded: {shop.load(dsn):,} rows in {len(shop.TABLES)} tables.")


def write_pipeline(directory: Path) -> Path:
    """Write the pipeline file; it names Airflow's connections, so that no password is in it."""
    path = directory / "shop.yaml"
    path.write_text(PIPELINE.format(state=f"file://{directory}/state"), encoding="utf-8")
    return path


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
    jobs = {beat.part: beat.progress for beat in read_heartbeats(State(run.pipeline.state))}
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
    servers = f"source   {run.pipeline.source.dsn}\ntarget   {run.pipeline.sink.dsn}"
    run.screen.print(f"\nAirflow  {run.airflow.base_url}\n{servers}\n\nAll of it runs until you press Ctrl-C.")
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
