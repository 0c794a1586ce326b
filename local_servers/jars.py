"""Fetches packages for Spark, once, into a folder that only the demo, the tests and the benchmarks use.

Users name packages in ``spark.jars.packages``, and Spark fetches them into its cache in the home directory. A demo
cannot rely on that: two jobs that find the cache empty at the same time interfere with each other. Spark's resolver
also fails if a Maven folder in the home directory describes a jar without containing it.
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
"""The home directory of Spark's resolver if ``SPARK_SUBMIT_OPTS`` contains :data:`JAVA_OPTIONS`."""

SUMS = Path(__file__).with_name("jars.sha256")
"""The checksums of all jars that are fetched, in the format of ``sha256sum``."""

JAVA_OPTIONS = f"-Duser.home={HOME}"

JARS = ".ivy*/jars/*.jar"
"""Where a resolver keeps them, below its home."""

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
    """Fetch a package with all its dependencies into a folder, unless they exist.

    :param package: ``group:artifact:version``.
    :param home: folder that contains the cache of Spark's resolver.
    :returns: all jars in the folder.
    :raises JarsMissing: if no Maven repository can be reached, or if a jar differs from the known one.
    """
    _, artifact, version = package.split(":")
    home.mkdir(parents=True, exist_ok=True)
    with (home / "fetching").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(home.glob(f".ivy*/jars/*{artifact}-{version}.jar")):
            before = set(home.glob(JARS))
            _resolve(package, home)
            require_known(set(home.glob(JARS)) - before)
    return sorted(home.glob(JARS))


def require_known(jars: Iterable[Path]) -> None:
    """Remove jars that are not those of ``jars.sha256``, before any process loads them.

    To use a newer version, first add the output of ``sha256sum`` for the files in the resolver's folder ``jars``.

    :raises JarsMissing: with the name of the first such jar.
    """
    lines = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    known = {name: digest for digest, name in lines}
    strange = sorted(jar for jar in jars if hashlib.sha256(jar.read_bytes()).hexdigest() != known.get(jar.name))
    for jar in strange:
        jar.unlink()
    if strange:
        raise JarsMissing(
            f"{strange[0].name} does not match its checksum in {SUMS}",
            "Find out why the Maven repository, or a proxy in front of it, has a different jar. To use a newer version,"
            " add its checksum to that file.",
        )


@contextmanager
def package_available(package: str) -> Iterator[None]:
    """Fetch a package, and let every Spark started meanwhile, also by other processes, look for packages there.

    :raises JarsMissing: if no Maven repository can be reached.
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
        said = f"the download did not end within {_PATIENCE:.0f} seconds"
    if said:
        raise JarsMissing(
            f"{package} cannot be fetched: {said}",
            "Make sure that Maven Central can be reached, through a proxy if this machine needs one.",
        )
