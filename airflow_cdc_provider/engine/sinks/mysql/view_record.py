"""The versions of views in the commit record of a MySQL sink.

Their tables are in the database ``airflow_cdc`` until a version takes the view's name. Names follow from the number of
a version, so that what a crash leaves behind is found again. A version that has ended is marked as *removed* in a
transaction; its tables are dropped afterwards, because DROP TABLE commits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection

from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.settings import ViewSettings
from airflow_cdc_provider.engine.views.version import ViewVersion

_VIEWS = (
    "pipeline VARCHAR(64) NOT NULL, version INT NOT NULL, settings LONGTEXT NOT NULL, definition LONGTEXT NOT NULL,"
    " relation VARCHAR(64) NOT NULL DEFAULT '', queue VARCHAR(64) NOT NULL DEFAULT '', built LONGTEXT,"
    " complete BOOLEAN NOT NULL DEFAULT FALSE, kept BOOLEAN NOT NULL DEFAULT TRUE,"
    " removed BOOLEAN NOT NULL DEFAULT FALSE, awaits VARCHAR(64) NOT NULL DEFAULT '',"
    " behind_lsn BIGINT UNSIGNED, anchors_built BIGINT NOT NULL DEFAULT 0,"
    " anchors_expected BIGINT NOT NULL DEFAULT 0, units BIGINT NOT NULL DEFAULT 0, anchors BIGINT NOT NULL DEFAULT 0,"
    " seconds DOUBLE NOT NULL DEFAULT 0, PRIMARY KEY (pipeline, version)"
)
KIND = "view"
"""Kind of the announced exchange of a view; :mod:`.pending_ddl` has the others."""


def has_views(session: Session) -> bool:
    """Return whether the record has the table."""
    return session.exists("airflow_cdc", "views")


def create_views(session: Session) -> None:
    """Create the table, which records of earlier versions of the engine lack; this ends a transaction."""
    session.run(
        f"CREATE TABLE IF NOT EXISTS airflow_cdc.views ({_VIEWS}) ENGINE=InnoDB"
        f" CHARACTER SET utf8mb4 COLLATE {session.collation}"
    )


def read_versions(session: Session, pipeline: str) -> list[ViewVersion]:
    """Return the versions of a pipeline's views, in order; the table exists."""
    found = session.rows(
        "SELECT version, settings, definition, relation, queue, built, complete, kept, behind_lsn, anchors_built,"
        " anchors_expected, units, anchors, seconds FROM airflow_cdc.views WHERE pipeline = %s AND NOT removed"
        " AND awaits = '' ORDER BY version",
        [pipeline],
    )
    return [
        ViewVersion(
            number,
            ViewSettings(**json.loads(settings)),
            View.from_dict(json.loads(definition)),
            relation,
            queue,
            None if built is None else tuple(json.loads(built)),
            bool(complete),
            bool(kept),
            None if behind is None else LogPosition(int(behind)),
            *counts,
        )
        for number, settings, definition, relation, queue, built, complete, kept, behind, *counts in found
    ]


def table_names(pipeline: str, number: int) -> tuple[str, str]:
    """Return the names of a version's tables in ``airflow_cdc``: of its rows, and of its queue."""
    mark = hashlib.sha256(f"{pipeline} {number}".encode()).hexdigest()[:12]
    return f"view_{mark}", f"queue_{mark}"


def rows_table(version: ViewVersion) -> str:
    """Return the quoted name of the table that has a version's rows."""
    return quoted(version.view.schema if version.in_place else "airflow_cdc", version.relation)


def add_version(session: Session, pipeline: str, settings: ViewSettings, view: View, awaits: str = "") -> None:
    """Add a version that is to be built.

    :param awaits: token of the alteration without which there will be no such version.
    """
    (last,) = session.one("SELECT COALESCE(MAX(version), 0) FROM airflow_cdc.views WHERE pipeline = %s", [pipeline])
    session.run(
        "INSERT INTO airflow_cdc.views (pipeline, version, settings, definition, awaits) VALUES (%s, %s, %s, %s, %s)",
        [pipeline, int(last) + 1, json.dumps(dataclasses.asdict(settings)), json.dumps(view.to_dict()), awaits],
    )


def change_version(session: Session, pipeline: str, number: int, **values: object) -> None:
    """Change columns of a version; texts and numbers as they are, lists as JSON."""
    pairs = ", ".join(f"{name} = %s" for name in values)
    parameters = [json.dumps(value) if isinstance(value, list) else value for value in values.values()]
    session.run(
        f"UPDATE airflow_cdc.views SET {pairs} WHERE pipeline = %s AND version = %s", [*parameters, pipeline, number]
    )


def change_settings(session: Session, pipeline: str, number: int, settings: ViewSettings) -> None:
    """Change the settings of a version."""
    change_version(session, pipeline, number, settings=json.dumps(dataclasses.asdict(settings)))


def record_work(
    session: Session, pipeline: str, version: ViewVersion, behind: LogPosition | None, anchors: int, seconds: float
) -> None:
    """Record a unit that affected a version."""
    session.run(
        "UPDATE airflow_cdc.views SET behind_lsn = %s, units = units + 1, anchors = anchors + %s,"
        " seconds = seconds + %s WHERE pipeline = %s AND version = %s",
        [behind, anchors, seconds, pipeline, version.number],
    )


def end_version(session: Session, pipeline: str, version: ViewVersion, applied: LogPosition) -> None:
    """Let a version no longer move with the mirror; mark it as removed if readers do not see it yet."""
    if not version.in_place:
        change_version(session, pipeline, version.number, removed=True)
    elif version.kept:
        behind = applied if version.behind is None else version.behind
        change_version(session, pipeline, version.number, kept=False, behind_lsn=behind)


def has_removed(session: Session, pipeline: str) -> bool:
    """Return whether tables of removed versions may be left."""
    return bool(session.rows("SELECT 1 FROM airflow_cdc.views WHERE pipeline = %s AND removed LIMIT 1", [pipeline]))


def drop_removed(session: Session, pipeline: str) -> None:
    """Drop the tables of removed versions; called under the named lock, outside of a transaction."""
    found = session.rows("SELECT version FROM airflow_cdc.views WHERE pipeline = %s AND removed", [pipeline])
    for (number,) in found:
        for name in table_names(pipeline, number):
            session.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', name)}")
        session.run("DELETE FROM airflow_cdc.views WHERE pipeline = %s AND version = %s", [pipeline, number])


# -- the exchange of a view's tables -------------------------------------------------------------------


def announce_exchange(session: Session, pipeline: str, version: ViewVersion) -> None:
    """Write to the record, within a transaction, that a version is about to take the view's name."""
    session.run(
        "INSERT INTO airflow_cdc.pending (pipeline, source_table, kind, token, target_schema, target_table, definition,"
        " reread) VALUES (%s, %s, %s, %s, %s, %s, %s, FALSE)",
        [
            pipeline,
            f"{KIND} {version.number}",  # labels of tables have a dot
            KIND,
            version.relation,
            version.view.schema,
            version.view.name,
            str(version.number),
        ],
    )


def finish_exchange(session: Session, pipeline: str, number: int) -> None:
    """Record an announced exchange if it has happened, otherwise withdraw it; called under the named lock."""
    session.begin()
    versions = {version.number: version for version in read_versions(session, pipeline)}
    done = versions.get(number)
    if done is not None and not session.exists("airflow_cdc", done.relation):
        change_version(session, pipeline, number, relation=done.view.name)
        for former in _others(done, versions.values()):
            change_version(session, pipeline, former.number, removed=True)
    session.run(
        "DELETE FROM airflow_cdc.pending WHERE pipeline = %s AND source_table = %s", [pipeline, f"{KIND} {number}"]
    )
    session.commit()


def finish_awaited(session: Session, pipeline: str, token: str, made: bool) -> None:
    """Let the versions that await an alteration replace the former ones, or forget them; within a transaction."""
    if not has_views(session):
        return
    where = "pipeline = %s AND awaits = %s"
    found = session.rows(f"SELECT version FROM airflow_cdc.views WHERE {where}", [pipeline, token])
    if not made:
        session.run(f"DELETE FROM airflow_cdc.views WHERE {where}", [pipeline, token])
        return
    session.run(f"UPDATE airflow_cdc.views SET awaits = '' WHERE {where}", [pipeline, token])
    (applied,) = session.one("SELECT applied_lsn FROM airflow_cdc.pipelines WHERE pipeline = %s", [pipeline])
    versions = read_versions(session, pipeline)
    for version in versions:
        if (version.number,) in found:
            for former in _others(version, versions):
                end_version(session, pipeline, former, LogPosition(int(applied)))


def _others(version: ViewVersion, versions: Collection[ViewVersion]) -> list[ViewVersion]:
    """Return the versions of the same view that a complete one replaces."""
    return [each for each in versions if each.view.label == version.view.label and each.number < version.number]
