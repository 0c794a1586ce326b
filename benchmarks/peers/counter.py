"""Programs in Java, beside this file, that count what an engine brings; they are compiled once in a laboratory.

They begin with a line, tell number and sum of keys of all changes by another when there are as many as they were to
wait for, and stay until they are killed, so that the walsender can be asked when it began.
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
    """There is no Java compiler."""


@dataclass(frozen=True)
class Counter:
    """A program that counts."""

    process: subprocess.Popen[str]
    log: Path

    def line(self) -> str:
        """What it tells next.

        :raises WrongResult: when it ends instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WrongResult(f"a counter ended: {self.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}")
        return line.strip()


def class_path(name: str, packages: Sequence[str]) -> str:
    """The jars of packages and of what they need, fetched from Maven Central if need be.

    :param name: of the folder that has them, and no others.
    :raises JarsMissing: when they cannot be fetched.
    :raises JdkMissing: when nothing could compile what needs them.
    """
    if shutil.which("javac") is None:
        raise JdkMissing("There is no javac on this machine.", "Install a JDK of Java 17 or newer.")
    jars = [fetch(package, HOME / name) for package in packages][-1]
    # Flink's have classes in place of Debezium's own.
    group = packages[0].partition(":")[0]
    return ":".join(map(str, sorted(jars, key=lambda jar: not jar.name.startswith(f"{group}_"))))


@contextmanager
def counting(
    lab: Lab, program: str, jars: str, properties: Mapping[str, str], *arguments: str, options: Sequence[str] = ()
) -> Iterator[Counter]:
    """Run a program.

    :param program: the name of its class.
    :param jars: its class path.
    :param properties: a file of them is its first argument.
    :param arguments: all others.
    :param options: of the JVM.
    """
    classes = lab.directory / "classes" / program
    if not classes.exists():
        source = Path(__file__).with_name(f"{program}.java")
        subprocess.run(["javac", "-nowarn", "-cp", jars, "-d", str(classes), str(source)], check=True)
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
