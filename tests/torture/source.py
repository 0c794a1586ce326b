"""The source under torture: a primary, and the standbys that take its place."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.timeline import parse_history
from local_servers.postgres import PostgresServer
from local_servers.process import find_free_port
from tests.conftest import create_roles
from tests.support.databases import execute, query_rows

_STANDBY = """
port = {port}
primary_conninfo = '{primary}'
primary_slot_name = 'standby'
sync_replication_slots = on
hot_standby_feedback = on
wal_receiver_status_interval = 1
wal_retrieve_retry_interval = 100
"""
# Transactions are acknowledged to writers, and streamed, only once the standby has them, except asynchronous ones.
_SYNCHRONOUS = (
    "ALTER SYSTEM SET synchronous_standby_names = '*'",
    "ALTER SYSTEM SET synchronized_standby_slots = 'standby'",
    "SELECT pg_reload_conf()",
)


class Source:
    """Two addresses, one of which is the primary's.

    :param directory: directory in which the servers are created.
    :param settings: settings of all servers.
    """

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        self._directory = directory
        self.primary = PostgresServer.create(directory / "source1", "18", settings)
        self._other_port = find_free_port()
        self._hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self._other_port}"
        self.left: dict[int, int] = {}
        """Where the log of each earlier timeline was left."""
        self.primary.start()
        create_roles(self.primary)

    def dsn(self, database: str) -> str:
        """Return the URI of the primary, at whichever address it is."""
        return f"postgresql://postgres@{self._hosts}/{database}?target_session_attrs=read-write"

    def stop(self) -> None:
        """Stop the primary."""
        self.primary.stop("immediate")

    def fail_over(self, peaceful: bool, slots: Mapping[str, tuple[float, Callable[[], object]]]) -> None:
        """Replace the primary with a new standby.

        :param peaceful: stop the primary, which then sends everything; otherwise it is killed, and asynchronous commits
            may be lost.
        :param slots: slots to synchronize to the standby, with the seconds that each has for that, and a function that
            advances it if it has no reader: it is synchronized only at a position that the standby can decode from.
        """
        old, new = self.primary, self._make_standby()
        execute(old.dsn(), *_SYNCHRONOUS)
        new.start()
        for slot, (seconds, advance) in slots.items():
            condition = f"slot_name = '{slot}' AND synced AND NOT temporary"
            query = f"SELECT count(*) FROM pg_replication_slots WHERE {condition}"

            def arrived(query: str = query, advance: Callable[[], object] = advance) -> bool:
                execute(old.dsn(), "SELECT pg_log_standby_snapshot()")
                advance()
                return query_rows(new.dsn(), query) == [(1,)]

            await_condition(arrived, seconds, interval=0.5)
        if peaceful:
            old.stop("fast")
        else:
            old.kill()
        execute(new.dsn(), "SELECT pg_promote()")
        primary = f"SELECT pg_read_file('pg_wal/{len(self.left) + 2:08X}.history', true)"
        ((history,),) = query_rows(new.dsn(), primary)
        self.left = {switch.timeline: switch.lsn for switch in parse_history(history)}
        self.primary, self._other_port = new, old.port
        shutil.rmtree(old.data_directory)

    def _make_standby(self) -> PostgresServer:
        """Return a copy of the primary at the other address, not started yet."""
        old = self.primary
        execute(old.dsn(), "SELECT pg_create_physical_replication_slot('standby', true)")
        directory = self._directory / f"source{len(self.left) + 2}"
        directory.mkdir()
        old.account.own(directory)
        new = PostgresServer(directory, old.binaries, self._other_port, old.account)
        subprocess.run(
            [old.binaries / "pg_basebackup", "-d", old.dsn(), "-D", new.data_directory, "-c", "fast", "-N"],
            check=True,
            capture_output=True,
            **old.account.popen_arguments(),
        )
        with (new.data_directory / "postgresql.conf").open("a") as file:
            file.write(_STANDBY.format(port=new.port, primary=old.dsn()))
        (new.data_directory / "standby.signal").touch()
        old.account.own(new.data_directory / "standby.signal")
        return new
