"""The demos: ``python -m demo [--pipeline NAME]``.

Each starts its servers and a real Airflow, writes to the source, runs the Dag
``cdc_pipeline`` by Airflow's REST API, and compares source and target in the end:
:mod:`.tables` copies a Postgres shop to any kind of store, :mod:`.topics` makes
windows of events in Kafka. Everything that is started ends with the demo.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from airflow_cdc_provider.engine.core.errors import CdcError
from demo import tables
from demo.dag_run import DagRun
from demo.screen import Screen
from demo.warehouse import WAREHOUSES
from demo.work_directory import work_directory

Begin: TypeAlias = Callable[[ExitStack, Path, Screen], DagRun[Any]]

SHOP = "shop"
TOPICS = ("kafka-to-mysql", "kafka-to-kafka")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo; 0 if it succeeded."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sink and options.pipeline != SHOP:
        parser.error(f"--sink is for the shop: what {options.pipeline} writes to is in its name")
    # Whatever ends us, the processes that we started are to be stopped in order.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    screen = Screen(sys.stdout)
    try:
        with work_directory(options.directory) as directory:
            return demonstrate(directory, screen, _demo(options), options.keep)
    except CdcError as error:
        screen.tell_failure(error)
    except KeyboardInterrupt:
        screen.say("Interrupted; everything is stopped.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="Shows pipelines at work, and compares what they made."
    )
    parser.add_argument(
        "--pipeline",
        choices=(SHOP, *TOPICS),
        default=SHOP,
        help="copy a Postgres shop (shop, the default), or make windows of events in Kafka",
    )
    parser.add_argument("--sink", choices=WAREHOUSES, help="kind of store that the shop is copied to, or postgres")
    parser.add_argument("--keep", action="store_true", help="leave everything running at the end, until Ctrl-C")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="work in this new or empty directory, and leave it behind"
    )
    return parser


def _demo(options: argparse.Namespace) -> Begin:
    if options.pipeline == SHOP:
        return partial(tables.begin, sink=options.sink or "postgres")
    from demo import topic_cases, topics  # late: only these demos need Kafka's client

    return partial(topics.begin, case=topic_cases.CASES[options.pipeline])


def demonstrate(directory: Path, screen: Screen, begin: Begin, keep: bool) -> int:
    """Start everything, run the Dag, judge the result, stop everything."""
    with ExitStack() as started:
        run = begin(started, directory, screen)
        try:
            succeeded = run.perform()
        except CdcError as error:
            if not keep:
                raise
            screen.tell_failure(error)
            succeeded = False
        if keep:
            keep_running(run)
    return 0 if succeeded else 1


def keep_running(run: DagRun[Any]) -> None:
    """Leave everything up until the user has seen enough."""
    servers = f"source   {run.source}\ntarget   {run.pipeline.sink.place}"
    run.screen.print(f"\nAirflow  {run.airflow.base_url}\n{servers}\n\nAll of it runs until you press Ctrl-C.")
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
