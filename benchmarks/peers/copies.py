"""Postgres's own tools, which copy a table into an empty one with a primary key: ``COPY`` and ``pg_dump``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.lab import Lab, create_database, drop_database, execute
from benchmarks.report import check
from benchmarks.shapes import Shape

COPY, DUMP = "copy | copy", "pg_dump | psql"


@contextmanager
def target(lab: Lab, database: str, shape: Shape, what: str) -> Iterator[str]:
    """Create an empty table in a target database of the same name, and check it against the source afterwards.

    :param what: name of the case for errors.
    """
    create_database(lab.target, database)
    execute(lab.target.dsn(database), *shape.ddl)
    lab.settle()
    try:
        yield lab.target.dsn(database)
        lab.check_equal(database, database, f"{what}: rows and checksum", shape.names)
    finally:
        drop_database(lab.target, database)


def copy(lab: Lab, source: str, into: str, parts: Sequence[str] = ("true",)) -> None:
    """Copy the table with one pair of ``COPY TO STDOUT`` and ``COPY FROM STDIN`` per condition."""
    psql = _psql(lab)
    _pipe(
        [
            (
                [*psql, f"COPY (SELECT * FROM public.t WHERE {part}) TO STDOUT", source],
                [*psql, "COPY public.t FROM STDIN", into],
            )
            for part in parts
        ],
        COPY,
    )


def dump(lab: Lab, source: str, into: str) -> None:
    """Copy the table with ``pg_dump`` piped into ``psql``."""
    pg_dump = [str(lab.source.binaries / "pg_dump"), "--data-only", "--table=public.t", source]
    _pipe([(pg_dump, [*_psql(lab)[:-1], "--output=/dev/null", into])], DUMP)


def _psql(lab: Lab) -> list[str]:
    return [str(lab.source.binaries / "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--command"]


def _pipe(commands: Sequence[tuple[list[str], list[str]]], what: str) -> None:
    with ExitStack() as started:
        processes = []
        for reading, writing in commands:
            reader = started.enter_context(subprocess.Popen(reading, stdout=subprocess.PIPE))
            processes += [reader, started.enter_context(subprocess.Popen(writing, stdin=reader.stdout))]
    check([0] * len(processes), [process.returncode for process in processes], f"{what}: exit codes")
