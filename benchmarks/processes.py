"""Reads what the processes of a pipeline use, by kind: current memory, and CPU time since their start.

======== =====================================================================
driver   the process that runs the job
jvm      the JVM next to it, and those of executors
workers  Python workers of Spark, and the processes that fork them
reader   the process that holds the replication connection
decoding the walsender at the source
source   the rest of the source, mostly the load that is written
target   the target
======== =====================================================================
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from local_servers.postgres import PostgresServer

ENGINE = ("driver", "jvm", "workers", "reader")
KINDS = (*ENGINE, "decoding", "source", "target")


def engine_of(driver: int) -> Iterator[tuple[str, psutil.Process]]:
    """Return the kind of each process of a job; ``driver`` is the id of the first."""
    process = psutil.Process(driver)
    yield "driver", process
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "java":
                yield "jvm", child
                for each in child.children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        yield _kind(each), each


def memory_of(driver: int) -> dict[str, int]:
    """Return the resident bytes of a job by kind."""
    used = dict.fromkeys(ENGINE, 0)
    for kind, process in engine_of(driver):
        with contextlib.suppress(psutil.NoSuchProcess):
            used[kind] += process.memory_info().rss
    return used


@dataclass(frozen=True)
class Meter:
    """Reads the CPU time of a job and of both its servers.

    :param driver: id of the job's first process.
    """

    driver: int
    source: PostgresServer
    target: PostgresServer

    def read(self) -> Counter[str]:
        """Return seconds of CPU time by kind, ended processes included; ended children of a JVM count as workers."""
        used: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))  # type: ignore[arg-type]
        for kind, process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[kind] += times.user + times.system  # type: ignore[assignment]
                if kind != "driver":  # not all of its children belong to the job
                    forked = "workers" if kind == "jvm" else kind
                    used[forked] += times.children_user + times.children_system  # type: ignore[assignment]
        return used

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return seconds of CPU time by kind since an earlier reading."""
        now = self.read()
        return {kind: now[kind] - before[kind] for kind in KINDS}

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        yield from engine_of(self.driver)
        for kind, server in (("source", self.source), ("target", self.target)):
            first = psutil.Process(int((server.data_directory / "postmaster.pid").read_text().split()[0]))
            for process in (first, *first.children()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    yield ("decoding" if " walsender " in " ".join(process.cmdline()) else kind), process


def _kind(process: psutil.Process) -> str:
    if process.name() == "java":
        return "jvm"
    return "reader" if any("streaming_source_runner" in word for word in process.cmdline()) else "workers"
