"""A temporary MariaDB or MySQL server in a directory of its own, next to those of Postgres in :mod:`.postgres`.

The binaries are those of the system's package of MariaDB, or a MySQL server's that is named. The package's own service,
its configuration and its data are never touched: this server reads no configuration file, listens on a port of loopback
that was free, and everything that it writes is in its directory. Like Postgres it does not run as root, who starts it
as an unprivileged user.
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


class MariadbServer(ServerProcess):
    """One MariaDB or MySQL server with its directory; made by :meth:`create`."""

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
        """Initialise a server in ``directory``, which is new or empty; it is not started yet.

        :param settings: system variables by name, as they are at each start.
        :param programs: what to run, the system's MariaDB unless given.
        :raises ServerError: when the binaries are missing, or do not run here.
        """
        programs = programs or Programs.mariadb()
        directory, account = claim_directory(directory, cls.name)
        if len(str(directory)) > _SOCKET_LENGTH:
            raise ServerError(f"{directory} is too long for a socket.", "Choose a directory directly below /tmp.")
        server = cls(directory, find_free_port(), account, settings or {}, programs)
        server.scratch.mkdir()
        account.own(server.scratch)
        install = [*programs.install, f"--datadir={server.data_directory}"]
        done = run_as(account, install, directory, server.environment)
        if done.returncode != 0:
            raise ServerError(
                f"{Path(programs.install[0]).name} failed with exit code {done.returncode}:\n"
                f"{done.stdout}{done.stderr}".rstrip(),
                "Check that the directory is writable and the disk has space.",
            )
        return server

    @property
    def scratch(self) -> Path:
        """Where the server's temporary files are: one that starts removes those of all others in the same place."""
        return self.directory / "tmp"

    @property
    def environment(self) -> Mapping[str, str]:
        """Ours, with a place for temporary files."""
        return {**os.environ, "TMPDIR": str(self.scratch)}

    @property
    def dsn(self) -> str:
        """A connection URI of the administrator, who needs no password on loopback, nor TLS."""
        return f"mysql://root@127.0.0.1:{self.port}/?ssl_mode=disabled"

    def connect(self) -> pymysql.Connection:
        """A session of the administrator, which commits every statement."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True, charset="utf8mb4")

    def command(self) -> Sequence[str]:
        """See :meth:`.ServerProcess.command`."""
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
        """See :meth:`.ServerProcess.probe`; it answers when a login succeeds."""

        def answers() -> bool:
            with contextlib.suppress(pymysql.OperationalError):
                self.connect().close()
                return True
            return False

        return answers

    def check_identity(self) -> None:
        """See :meth:`.ServerProcess.check_identity`."""
        with contextlib.closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@datadir")
            (answered,) = cursor.fetchone() or ("",)
        if Path(answered) != self.data_directory:
            raise ServerError(
                f"The server on port {self.port} has its data in {answered}, not in {self.data_directory}.",
                "Another server took the port; try again.",
            )
