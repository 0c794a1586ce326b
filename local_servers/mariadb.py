"""A temporary MariaDB or MySQL server in a directory of its own, beside those of Postgres in :mod:`.servers`.

The binaries are those of the system's package of MariaDB, or a MySQL server's that is named. The package's own service,
its configuration and its data are never touched: this server reads no configuration file, listens on a port of loopback
that was free, and everything that it writes is in its directory. Like Postgres it does not run as root, who starts it
as an unprivileged user.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pymysql

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.postgres import (
    LOG_TAIL_LINES,
    START_SECONDS,
    STOP_SECONDS,
    Account,
    ServerError,
    end_guard,
    find_free_port,
    start_guard,
)

_SOCKET_LENGTH = 100


def _program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/local/mysql/bin")
    if found is None:
        raise ServerError(
            f"There is no {name} on this machine.",
            "Install the system's MariaDB server; on Debian: apt-get install mariadb-server.",
        )
    return found


@dataclass(frozen=True)
class Programs:
    """Commands that make a data directory and that serve it, without a configuration file."""

    install: Sequence[str]
    serve: Sequence[str]

    @classmethod
    def mariadb(cls) -> Programs:
        """Those of the system.

        :raises ServerError: when there are none.
        """
        options = ("--no-defaults", "--skip-name-resolve")
        install = (*options, "--auth-root-authentication-method=normal", "--skip-test-db")
        return cls((_program("mariadb-install-db"), *install), (_program("mariadbd"), *options))

    @classmethod
    def mysql(cls, mysqld: str) -> Programs:
        """Those of MySQL, which are one.

        :param mysqld: its path.
        """
        options = ("--mysqlx=OFF", "--skip-log-bin", "--secure-file-priv=NULL", "--local-infile=ON")
        return cls((mysqld, "--no-defaults", "--initialize-insecure"), (mysqld, "--no-defaults", *options))


@dataclass(eq=False)
class MariadbServer:
    """One MariaDB or MySQL server with its directory; made by :meth:`create`."""

    directory: Path
    port: int
    account: Account
    settings: Mapping[str, str]
    programs: Programs
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _guard: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def create(
        cls, directory: Path, settings: Mapping[str, str] | None = None, programs: Programs | None = None
    ) -> MariadbServer:
        """Initialise a server in ``directory``, which is new or empty; it is not started yet.

        :param settings: system variables by name, as they are at each start.
        :param programs: what to run, the system's MariaDB unless given.
        :raises ServerError: when the binaries are missing, or do not run here.
        """
        programs = programs or Programs.mariadb()
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ServerError(f"{directory} is not empty.", "Choose a directory that is new or empty.")
        account = Account.choose()
        account.own(directory)
        if not account.can_enter(directory) or len(str(directory)) > _SOCKET_LENGTH:
            raise ServerError(
                f"{directory} cannot be reached by the user as whom MariaDB must run, or is too long for a socket.",
                "Choose a directory whose parents are open to all users, for instance directly below /tmp.",
            )
        server = cls(directory, find_free_port(), account, settings or {}, programs)
        server.scratch.mkdir()
        account.own(server.scratch)
        done = subprocess.run(
            [*programs.install, f"--datadir={server.data_directory}"],
            cwd=directory,
            env=server.environment,
            capture_output=True,
            text=True,
            check=False,
            **account.popen_arguments(),
        )
        if done.returncode != 0:
            raise ServerError(
                f"{Path(programs.install[0]).name} failed with exit code {done.returncode}:\n"
                f"{done.stdout}{done.stderr}".rstrip(),
                "Check that the directory is writable and the disk has space.",
            )
        return server

    @property
    def data_directory(self) -> Path:
        """Where the server keeps its data."""
        return self.directory / "data"

    @property
    def scratch(self) -> Path:
        """Where the server's temporary files are: one that starts removes those of all others in the same place."""
        return self.directory / "tmp"

    @property
    def environment(self) -> dict[str, str]:
        """Of the server's processes."""
        return {**os.environ, "TMPDIR": str(self.scratch)}

    @property
    def log_file(self) -> Path:
        """Where the server's log goes."""
        return self.directory / "server.log"

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def dsn(self) -> str:
        """A connection URI of the administrator, who needs no password on loopback, nor TLS."""
        return f"mysql://root@127.0.0.1:{self.port}/?ssl_mode=disabled"

    def connect(self) -> pymysql.Connection:
        """A session of the administrator, which commits every statement."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True, charset="utf8mb4")

    def start(self) -> None:
        """Start the server and wait until it answers; a running server is left alone."""
        if self.running:
            return
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [
                    *self.programs.serve,
                    f"--datadir={self.data_directory}",
                    "--bind-address=127.0.0.1",
                    f"--port={self.port}",
                    f"--socket={self.directory / 's'}",
                    f"--pid-file={self.directory / 'pid'}",
                    *(f"--{name}={value}" for name, value in self.settings.items()),
                ],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self.account.popen_arguments(),
            )
        self._process = process
        self._guard = start_guard(process.pid, signals=("TERM", "KILL"))
        atexit.register(self.kill)
        try:
            self._await_start(process)
            self._check_identity()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server; one that does not stop in time is killed."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        self.kill()

    def restart(self, mode: Literal["stop", "kill"] = "stop") -> None:
        """Stop or kill, and start on the same port and data."""
        self.stop() if mode == "stop" else self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the server, as a crash of the machine's would; it is one process."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        end_guard(self._guard)
        self._guard = None
        self._process = None
        atexit.unregister(self.kill)

    def remove(self) -> None:
        """Kill the server and delete its directory."""
        self.kill()
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
            with contextlib.suppress(pymysql.OperationalError):
                self.connect().close()
                return True
            return False

        if not await_condition(answers, START_SECONDS):
            raise self._start_failure(f"did not answer within {START_SECONDS:.0f} seconds")

    def _start_failure(self, what: str) -> ServerError:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        tail = re.sub(r"(?m)^", "  ", "\n".join(lines[-LOG_TAIL_LINES:]))
        return ServerError(
            f"MariaDB in {self.directory} {what}. The end of its log:\n{tail}",
            "Correct what the log names: a setting, a port that is taken, a full disk.",
        )

    def _check_identity(self) -> None:
        """Make sure that who answers is this server, before anybody creates or drops anything."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@datadir")
            (answered,) = cursor.fetchone() or ("",)
        if Path(answered) != self.data_directory:
            raise ServerError(
                f"The server on port {self.port} has its data in {answered}, not in {self.data_directory}.",
                "Another server took the port; try again.",
            )
