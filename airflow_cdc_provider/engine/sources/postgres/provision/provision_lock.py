"""The provision lock: only one command at a time makes or removes the slot of a pipeline.

If two commands found no record, or the same one, each would mistake the other's slot for the leftover of a failed
attempt. The lock is an advisory lock at the source, and the session that holds it does all the work there. So a command
that loses the lock changes nothing there any more, and the lock ends with the command, however that ends.
"""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import SecondWriter
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar

_SPACE = "airflow_cdc"
_WAIT_SECONDS = 1.0
"""Long enough for the session of a process that has just died to end; a command at work takes longer."""
_END_SECONDS = 10.0
_HOLDERS = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid() AND objsubid = 2"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND classid = (hashtext(%s)::bigint & 4294967295)::oid AND objid = (hashtext(%s)::bigint & 4294967295)::oid"
)


def take_provision_lock(source: Connection, pipeline: str, takeover: bool) -> None:
    """Take the lock of a pipeline until the session ends.

    :param source: the session that also has to do all work on slot and publication.
    :param takeover: end the session of another command that holds the lock, in place of being refused.
    :raises SecondWriter: naming that session.
    """
    names = [_SPACE, pipeline]

    def taken() -> bool:
        return bool(scalar(source, "SELECT pg_try_advisory_lock(hashtext(%s), hashtext(%s))", names))

    if taken():
        return
    if takeover:
        rows(source, f"SELECT pg_terminate_backend(pid) {_HOLDERS}", names)
    if not await_condition(taken, _END_SECONDS if takeover else _WAIT_SECONDS):
        pids = ", ".join(str(pid) for (pid,) in rows(source, f"SELECT pid {_HOLDERS}", names))
        raise SecondWriter(
            f"another command is making or removing the slot of pipeline {pipeline!r} (session {pids or '?'} of the"
            " source)",
            "Wait for it, or take over with --takeover.",
        )
