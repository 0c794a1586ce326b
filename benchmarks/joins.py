"""Measures a wide table that is kept by a view, by pg_ivm, by ``REFRESH MATERIALIZED VIEW``, and by Flink SQL.

The tables and units are those of :mod:`.views`. A view and Flink SQL follow the same tables of a source into the same
server. They copy the tables first. Then each is paused while a backlog is written, and drains it. It is killed in the
middle of a second backlog and started again. pg_ivm cannot follow a source, so its units are written into the tables
next to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.text_output import text_table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from benchmarks.following import SECONDS, Followed, Way, databases, follow
from benchmarks.lab import Lab, checksum, execute, laboratory, query
from benchmarks.live import started
from benchmarks.orders import KEYED, UNITS, Unit
from benchmarks.peers import flink_join, pg_ivm
from benchmarks.peers.flink_join import FLINK_JOIN
from benchmarks.report import check, spread

JOINS = "joins"
VIEW, REFRESH = "view", "REFRESH MATERIALIZED VIEW"

_MIB = 1 << 20


@dataclass(frozen=True)
class Joins:
    """What wide tables cost, each by the repeats.

    :param changes: number of changes of a backlog.
    :param upkeep: seconds a unit that a view took, as the record has it.
    :param local: the same for pg_ivm and a refresh.
    :param version: version of pg_ivm, if the server offers it.
    :param followed: how a view and Flink SQL followed a source.
    """

    changes: int
    upkeep: tuple[float, ...]
    local: tuple[pg_ivm.Local, ...]
    version: str | None
    followed: dict[str, tuple[Followed, ...]]

    name: ClassVar[str] = JOINS
    faults: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        kept = [each.kept - each.plain for each in self.local if each.kept is not None]
        upkeep = {VIEW: self.upkeep, REFRESH: [each.refresh for each in self.local]} | (
            {pg_ivm.PG_IVM: kept} if kept else {}
        )
        return {
            "changes": self.changes,
            "units": UNITS,
            "upkeep_seconds_a_unit": {name: spread(series, 3) for name, series in upkeep.items()},
            "plain_seconds_a_unit": spread((each.plain for each in self.local), 3),
            "pg_ivm": self.version,
            "left_out": [] if self.version else [pg_ivm.LEFT_OUT],
            "followed": {name: self._followed(each) for name, each in self.followed.items()},
        }

    def _followed(self, runs: tuple[Followed, ...]) -> dict[str, Any]:
        return {
            "copied_seconds": spread(each.copied for each in runs),
            "drained_seconds": spread(each.drained for each in runs),
            "changes_per_second": spread((self.changes / each.drained for each in runs), 0),
            "recovered_seconds": spread(each.recovered for each in runs),
            "connected_seconds": spread(each.connected for each in runs),
            "wrong_rows": spread((each.wrong for each in runs), 0),
            "state_mib": spread((each.state / _MIB for each in runs), 3),
        }

    def as_text(self) -> str:
        """Return the figures as tables."""
        found = self.as_json()
        upkeep = [[name, f"{each['median']:.2f}"] for name, each in found["upkeep_seconds_a_unit"].items()]
        shown = (
            "copied_seconds",
            "changes_per_second",
            "recovered_seconds",
            "connected_seconds",
            "wrong_rows",
            "state_mib",
        )
        body = [
            [name, *(f"{each[figure]['median']:,.1f}" for figure in shown)] for name, each in found["followed"].items()
        ]
        return "\n".join(
            [
                text_table(["wide table by", "seconds a unit"], upkeep),
                *found["left_out"],
                text_table(["", *(figure.replace("_", " ") for figure in shown)], body),
            ]
        )


def measure(orders: int, repeat: int) -> Joins:
    """Measure all of it.

    :param orders: number of orders; a unit changes the share of them that it changes of a million.
    :raises WrongResult: if a wide table differs from its SELECT.
    """
    flink_join.fetch_jars()
    unit = Unit.of(orders)
    upkeep, local = [], []
    followed: dict[str, list[Followed]] = {VIEW: [], FLINK_JOIN: []}
    with laboratory() as lab:
        version = pg_ivm.version(lab)
        execute(lab.source.dsn(), "ALTER SYSTEM SET wal_sender_timeout = 0", "SELECT pg_reload_conf()")
        for _ in range(repeat):
            local.append(pg_ivm.measure(lab, orders))
            with _view(lab, orders) as way:
                followed[VIEW].append(follow(lab, way, orders))
                check(0, followed[VIEW][-1].wrong, f"{VIEW}: rows that are wrong after a kill")
                upkeep.append(_upkeep(way.target))
            with _flink(lab, orders) as way:
                followed[FLINK_JOIN].append(follow(lab, way, orders))
    runs = {name: tuple(each) for name, each in followed.items()}
    return Joins(UNITS * unit.changes, tuple(upkeep), tuple(local), version, runs)


@contextmanager
def _view(lab: Lab, orders: int) -> Iterator[Way]:
    """Provision a pipeline with a view."""
    with databases(lab, VIEW, orders) as (source, target):
        state, file = lab.directory / "state" / VIEW, lab.directory / "view.yaml"
        document = {
            "pipeline": VIEW,
            "source": {"dsn": source, "tables": ["public.*"]},
            "sink": {"dsn": target, "views": {"dwd.wide": {"sql": KEYED}}},
            "state": f"file://{state}",
            "snapshot": {"parallelism": lab.cores},
            "stream": {"trigger": "1 second", "heartbeat": "5 seconds"},
            "spark": {
                "master": f"local[{lab.cores}]",
                "conf": {"spark.ui.enabled": "false", "spark.driver.memory": "1g"},
            },
        }
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        pipeline = Pipeline.load(file)
        commands.provision(pipeline)

        def copy() -> None:
            with started(file, "snapshot") as command:
                check(0, command.wait(SECONDS), f"{VIEW}: exit code of the snapshot")

        @contextmanager
        def stream() -> Iterator[int]:
            with started(file, "stream") as command:
                yield command.pid

        yield Way(VIEW, source, target, "dwd.wide", copy, stream, lambda: _size(state))
        for table in ("orders", "customers", "products"):
            check(checksum(source, table), checksum(target, table), f"{VIEW}: {table}")
        commands.drop(pipeline)


@contextmanager
def _flink(lab: Lab, orders: int) -> Iterator[Way]:
    """Prepare databases for Flink."""
    name = "flink"
    with databases(lab, name, orders) as (source, target):
        flink_join.prepare(lab, source, target)
        yield Way(
            FLINK_JOIN,
            source,
            target,
            flink_join.WIDE,
            lambda: None,
            lambda: flink_join.joining(lab, name, KEYED),
            lambda: flink_join.state_bytes(lab),
        )
        flink_join.discard(lab, source)


def _upkeep(target: str) -> float:
    """Return the seconds a unit that the view took, as the record has it."""
    (seconds,) = query(target, "SELECT seconds FROM airflow_cdc.views")
    return float(str(seconds)) / (2 * UNITS)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
