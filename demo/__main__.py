"""The demos: ``python -m demo [--pipeline NAME]``.

Each demo starts its servers and a real Airflow, writes to the source, runs the Dag ``cdc_pipeline`` through Airflow's
REST API, and finally compares source and target. :mod:`.tables` copies a Postgres shop to any kind of store,
:mod:`.wide` keeps views of such a copy, and :mod:`.topics` builds windows of events in Kafka. Everything that a demo
starts ends with it.
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
from demo import tables, wide
from demo.dag_run import DagRun
from demo.screen import Screen
from demo.warehouse import WAREHOUSES
from demo.work_directory import work_directory

Begin: TypeAlias = Callable[[ExitStack, Path, Screen], DagRun[Any]]

SHOP = "shop"
WIDE = "wide"
TOPICS = ("kafka-to-mysql", "kafka-to-kafka")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo, and return 0 if it succeeded."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sink and options.pipeline == WIDE:
        parser.error("--sink applies only to the shop; the wide table is in Postgres")
    if options.sink and options.pipeline != SHOP:
        parser.error(f"--sink applies only to the shop; the name {options.pipeline} includes the kind of sink")
    # Whatever signal ends this process, stop the started processes in order.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    screen = Screen(sys.stdout)
    try:
        with work_directory(options.directory) as directory:
            return demonstrate(directory, screen, _demo(options), options.keep)
    except CdcError as error:
        screen.tell_failure(error)
    except KeyboardInterrupt:
        screen.say("Interrupted. Everything has been stopped.")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="Run pipelines on real servers, and compare source and target."
    )
    parser.add_argument(
        "--pipeline",
        choices=(SHOP, WIDE, *TOPICS),
        default=SHOP,
        help="copy a Postgres shop (shop, the default), also keep views of it (wide), or build windows of Kafka events",
    )
    parser.add_argument("--sink", choices=WAREHOUSES, help="kind of store to copy the shop to (default: postgres)")
    parser.add_argument("--keep", action="store_true", help="leave everything running at the end, until Ctrl-C")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="work in this new or empty directory, and keep it"
    )
    return parser


def _demo(options: argparse.Namespace) -> Begin:
    if options.pipeline == SHOP:
        return partial(tables.begin, sink=options.sink or "postgres")
    if options.pipeline == WIDE:
        return wide.begin
    from demo import topic_cases, topics  # imported late, because only these demos need Kafka's client

    return partial(topics.begin, case=topic_cases.CASES[options.pipeline])


def demonstrate(directory: Path, screen: Screen, begin: Begin, keep: bool) -> int:
    """Start everything, run the Dag, check the result, and stop everything."""
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
    """Leave everything running until the user interrupts it."""
    servers = f"source   {run.source}\ntarget   {run.pipeline.sink.place}"
    run.screen.print(f"\nAirflow  {run.airflow.base_url}\n{servers}\n\nEverything runs until you press Ctrl-C.")
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
