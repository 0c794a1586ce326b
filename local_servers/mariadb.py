"""Runs a temporary MariaDB or MySQL server in its own directory, like the Postgres servers of :mod:`.postgres`.

The binaries are those of the system's MariaDB package, or of a given MySQL server. The package's service, configuration
and data are never touched: this server reads no configuration file, listens on a free port of loopback, and writes only
to its directory. Like Postgres it does not run as root; root starts it as an unprivileged user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pymysql

from local_servers.process import Account, ServerError, ServerProcess, claim_directory, find_free_port, run_as

_SOCKET_LENGTH = 100


def _program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/local/mysql/bin")
    if found is None:
        raise ServerError(
            f"The command {name} was not found.",
            "Install the system's MariaDB server; on Debian: `apt-get install mariadb-server`.",
        )
    return found


@dataclass(frozen=True)
class Programs:
    """Commands that create a data directory and that run the server on it, without a configuration file."""

    install: Sequence[str]
    serve: Sequence[str]

    @classmethod
    def mariadb(cls) -> Programs:
        """Return the commands of the system's MariaDB.

        :raises ServerError: if it is not installed.
        """
        options = ("--no-defaults", "--skip-name-resolve")
        install = (*options, "--auth-root-authentication-method=normal", "--skip-test-db")
        return cls((_program("mariadb-install-db"), *install), (_program("mariadbd"), *options))

    @classmethod
    def mysql(cls, mysqld: str) -> Programs:
        """Return the commands of MySQL, which has one program for both.

        :param mysqld: path of the program.
        """
        options = ("--mysqlx=OFF", "--skip-log-bin", "--secure-file-priv=NULL", "--local-infile=ON")
        return cls((mysqld, "--no-defaults", "--initialize-insecure"), (mysqld, "--no-defaults", *options))


class MariadbServer(ServerProcess):
    """One MariaDB or MySQL server with its directory; :meth:`create` makes it."""

    name = "MariaDB"

    def __init__(
        self, directory: Path, port: int, account: Account, settings: Mapping[str, str], programs: Programs
    ) -> None:
        super().__init__(directory, port, account)
        self.settings = settings
        self.programs = programs

    @classmethod
    def create(
        cls, directory: Path, settings: Mapping[str, str] | None = None, programs: Programs | None = None
    ) -> MariadbServer:
        """Initialize a server in ``directory``, which is new or empty, without starting it.

        :param settings: system variables by name; each start uses their current values.
        :param programs: commands to run, by default those of the system's MariaDB.
        :raises ServerError: if the binaries are missing, or do not run here.
        """
        programs = programs or Programs.mariadb()
        directory, account = claim_directory(directory, cls.name)
        if len(str(directory)) > _SOCKET_LENGTH:
            raise ServerError(
                f"The path {directory} is too long for a socket.", "Choose a directory directly below /tmp."
            )
        server = cls(directory, find_free_port(), account, settings or {}, programs)
        server.scratch.mkdir()
        account.own(server.scratch)
        install = [*programs.install, f"--datadir={server.data_directory}"]
        done = run_as(account, install, directory, server.environment)
        if done.returncode != 0:
            raise ServerError(
                f"{Path(programs.install[0]).name} failed with exit code {done.returncode}:\n"
                f"{done.stdout}{done.stderr}".rstrip(),
                "Check that the directory is writable and that the disk has space.",
            )
        return server

    @property
    def scratch(self) -> Path:
        """Return the folder for temporary files; a starting server removes those of all other servers there."""
        return self.directory / "tmp"

    @property
    def environment(self) -> Mapping[str, str]:
        """Return our environment with the server's folder for temporary files."""
        return {**os.environ, "TMPDIR": str(self.scratch)}

    @property
    def dsn(self) -> str:
        """Return the administrator's connection URI, which needs no password and no TLS on loopback."""
        return f"mysql://root@127.0.0.1:{self.port}/?ssl_mode=disabled"

    def connect(self) -> pymysql.Connection:
        """Open a session of the administrator in autocommit mode."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True, charset="utf8mb4")

    def command(self) -> Sequence[str]:
        return [
            *self.programs.serve,
            f"--datadir={self.data_directory}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            f"--socket={self.directory / 's'}",
            f"--pid-file={self.directory / 'pid'}",
            *(f"--{name}={value}" for name, value in self.settings.items()),
        ]

    def probe(self) -> Callable[[], bool]:
        """Return a function that succeeds when a login does."""

        def answers() -> bool:
            with contextlib.suppress(pymysql.OperationalError):
                self.connect().close()
                return True
            return False

        return answers

    def check_identity(self) -> None:
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@datadir")
            (answered,) = cursor.fetchone() or ("",)
        if Path(answered) != self.data_directory:
            raise ServerError(
                f"The server on port {self.port} has its data in {answered}, not in {self.data_directory}.",
                "Another server took the port; try again.",
            )
