"""Compiles and runs Java programs, next to this file, which count the changes that an engine delivers.

A program prints a line when it starts. When it has received the expected number of changes, it prints their number and
the sum of their keys. It then runs until it is killed, so that the start time of its walsender can be queried.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from airflow_cdc_provider.engine.core.errors import CdcError
from benchmarks.lab import Lab
from benchmarks.report import WrongResult
from local_servers.jars import HOME, fetch

_LOG_CHARACTERS = 2000
_SECONDS = 3600.0


class JdkMissing(CdcError):
    """The Java compiler is missing."""


@dataclass(frozen=True)
class Counter:
    """A running program that counts."""

    process: subprocess.Popen[str]
    log: Path

    def line(self) -> str:
        """Return the next line of its output.

        :raises WrongResult: if it ends instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WrongResult(f"a counter ended early: {self.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}")
        return line.strip()


def class_path(name: str, packages: Sequence[str]) -> str:
    """Return a class path with the jars of packages and their dependencies, fetched from Maven Central if necessary.

    :param name: the folder that holds these jars and no others.
    :raises JarsMissing: if they cannot be fetched.
    :raises JdkMissing: if there is no Java compiler.
    """
    if shutil.which("javac") is None:
        raise JdkMissing("There is no javac on the PATH.", "Install a JDK of Java 17 or newer.")
    jars = [fetch(package, HOME / name) for package in packages][-1]
    # Flink's jars contain classes that replace Debezium's own.
    group = packages[0].partition(":")[0]
    return ":".join(map(str, sorted(jars, key=lambda jar: not jar.name.startswith(f"{group}_"))))


def compiled(lab: Lab, program: str, jars: str) -> Path:
    """Return the folder with the classes of a program, which is compiled unless it has been.

    :param program: name of its class.
    :param jars: its class path.
    """
    classes = lab.directory / "classes" / program
    if not classes.exists():
        source = Path(__file__).with_name(f"{program}.java")
        subprocess.run(["javac", "-nowarn", "-cp", jars, "-d", str(classes), str(source)], check=True)
    return classes


@contextmanager
def counting(
    lab: Lab, program: str, jars: str, properties: Mapping[str, str], *arguments: str, options: Sequence[str] = ()
) -> Iterator[Counter]:
    """Run a program and kill it at the end.

    :param program: name of its class.
    :param jars: its class path.
    :param properties: contents of the properties file that is its first argument.
    :param arguments: all further arguments.
    :param options: options of the JVM.
    """
    classes = compiled(lab, program, jars)
    path, log = classes / "properties", classes / "log"
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()).replace("\\", "\\\\"))
    command = ["java", *options, "-cp", f"{classes}:{jars}", program, str(path), *arguments]
    with (
        log.open("w") as err,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True, cwd=lab.directory
        ) as process,
    ):
        patience = Timer(_SECONDS, process.kill)
        patience.start()
        try:
            yield Counter(process, log)
        finally:
            patience.cancel()
            process.kill()
