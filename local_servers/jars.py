"""A package of Spark, fetched once into a folder of the demo's and the tests' own.

Users name packages in ``spark.jars.packages`` and have Spark fetch them into its
cache in their home. That does not do for a demo: two jobs that find the cache
empty at the same time get into each other's way, and a Maven folder in the home
that knows of a jar without having it makes Spark's resolver fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from airflow_cdc_provider.engine.core.errors import CdcError

HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airflow-cdc"
"""What Spark's resolver takes for the home, if :data:`JAVA_OPTIONS` are among ``SPARK_SUBMIT_OPTS``."""

SUMS = Path(__file__).with_name("jars.sha256")
"""Of all jars that are fetched, as ``sha256sum`` writes them."""

JAVA_OPTIONS = f"-Duser.home={HOME}"

_JARS = ".ivy*/jars/*.jar"
_VARIABLE = "SPARK_SUBMIT_OPTS"
_PATIENCE = 300.0
_FETCH = """
import sys
from pyspark.sql import SparkSession
conf = {"spark.jars.packages": sys.argv[1], "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
SparkSession.builder.master("local[1]").config(map=conf).getOrCreate().stop()
"""


class JarsMissing(CdcError):
    """A package could not be fetched."""


def fetch(package: str, home: Path = HOME) -> list[Path]:
    """Have all jars of a package and of what it needs in a folder.

    :param package: ``group:artifact:version``.
    :param home: where Spark's resolver has its cache.
    :returns: all jars that are there.
    :raises JarsMissing: when there is no way to a Maven repository, or one has another jar than is known to us.
    """
    _, artifact, version = package.split(":")
    home.mkdir(parents=True, exist_ok=True)
    with (home / "fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(home.glob(f".ivy*/jars/*{artifact}-{version}.jar")):
            before = set(home.glob(_JARS))
            _resolve(package, home)
            require_known(set(home.glob(_JARS)) - before)
    return sorted(home.glob(_JARS))


def require_known(jars: Iterable[Path]) -> None:
    """Remove jars that are not those of ``jars.sha256``, before anything is started with them.

    A newer version has to be written there first: ``sha256sum`` of what the resolver has left in its folder ``jars``.

    :raises JarsMissing: naming the first.
    """
    lines = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    known = {name: digest for digest, name in lines}
    strange = sorted(jar for jar in jars if hashlib.sha256(jar.read_bytes()).hexdigest() != known.get(jar.name))
    for jar in strange:
        jar.unlink()
    if strange:
        raise JarsMissing(
            f"{strange[0].name} is not the jar whose sum is in {SUMS}",
            "Find out why the Maven repository, or what stands before it, has another one. If a newer version is meant,"
            " write its sum there.",
        )


@contextmanager
def at_hand(package: str) -> Iterator[None]:
    """Fetch a package, and have every Spark look for packages there, of processes that begin meanwhile, too.

    :raises JarsMissing: when there is no way to a Maven repository.
    """
    fetch(package)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = f"{before or ''} {JAVA_OPTIONS}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _resolve(package: str, home: Path) -> None:
    command = [sys.executable, "-c", _FETCH, package]
    environment = os.environ | {_VARIABLE: f"-Duser.home={home}"}
    try:
        fetching = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_PATIENCE
        )
        said = " ".join(fetching.stdout.split())[-400:] if fetching.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"no end within {_PATIENCE:.0f} seconds"
    if said:
        raise JarsMissing(
            f"{package} cannot be fetched: {said}",
            "See that Maven Central can be reached, by way of the proxy of this machine if it has one.",
        )
