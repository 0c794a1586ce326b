"""The claim to a pipeline: of the commands that make its slot, or remove it, one at a time.

Two that find no record, or the same one, would each take the other's slot for what a broken attempt has left. The
claim is a lock at the source, and the session that holds it does all that is done there: a command whose claim is
taken away touches nothing there any more, and however it ends, the claim ends with it.
"""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import SecondWriter
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.postgres.connection import Connection, rows, scalar

_SPACE = "airflow_cdc"
_WAIT_SECONDS = 1.0
"""For the session of a process that has just died to end; a command that works is not waited for."""
_END_SECONDS = 10.0
_HOLDERS = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid() AND objsubid = 2"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND classid = (hashtext(%s)::bigint & 4294967295)::oid AND objid = (hashtext(%s)::bigint & 4294967295)::oid"
)


def claim(source: Connection, pipeline: str, takeover: bool) -> None:
    """Claim a pipeline, until the session ends.

    :param source: whatever is done to slot and publication has to be done by this session.
    :param takeover: end the session of another command that holds the claim, rather than be refused.
    :raises SecondWriter: naming that session.
    """
    names = [_SPACE, pipeline]

    def claimed() -> bool:
        return bool(scalar(source, "SELECT pg_try_advisory_lock(hashtext(%s), hashtext(%s))", names))

    if claimed():
        return
    if takeover:
        rows(source, f"SELECT pg_terminate_backend(pid) {_HOLDERS}", names)
    if not await_condition(claimed, _END_SECONDS if takeover else _WAIT_SECONDS):
        pids = ", ".join(str(pid) for (pid,) in rows(source, f"SELECT pid {_HOLDERS}", names))
        raise SecondWriter(
            f"another command is making or removing the slot of pipeline {pipeline!r} (session {pids or '?'} of the"
            " source)",
            "Wait for it, or take over with --takeover.",
        )
