"""Everything about a pipeline that can be checked without Spark and without changing anything.

Each check is one sentence, with a remedy when it fails, and the checks go on after a failure wherever the next one
still means something: whoever sets up a source with the help of its administrator wants the whole list at once, not
one refusal a day.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import fsspec
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from airflow_cdc_provider.engine.commands.attention import require_source
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, MissingPrivilege, StateUnwritable
from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.core.record import CHANGELOG_NAMES, Record
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import connect, describe, rows
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.postgres.privileges import (
    leaves_where,
    may_read,
    quoted_user,
    sees_all_rows,
    takes_writes,
)
from airflow_cdc_provider.engine.runs.commit_records import sink_of
from airflow_cdc_provider.engine.runs.metrics import require_client
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import publication_sql, published_otherwise
from airflow_cdc_provider.engine.sources.postgres.provision.readiness import (
    check_settings,
    find_publication,
    may_create_publication,
)
from airflow_cdc_provider.engine.state.files import State, state_remedy
from airflow_cdc_provider.engine.state.location import require_own

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def preflight_on(pipeline: Pipeline, spark: SparkSession) -> list[Finding]:
    """Check what Spark alone can tell: of a pipeline over topics, what its query returns; changes nothing."""
    if pipeline.topics is None:
        return []
    from airflow_cdc_provider.engine.sources.kafka.provisioning import check_query

    return check_query(pipeline, spark)


def preflight_whole(pipeline: Pipeline) -> list[Finding]:
    """Return what :func:`preflight` finds, and, if that lets a session begin, :func:`preflight_on`."""
    findings = preflight(pipeline)
    if pipeline.topics is not None and all(finding.ok for finding in findings):
        from airflow_cdc_provider.engine.spark.session import spark_session

        with spark_session(pipeline, "preflight") as spark:
            findings += preflight_on(pipeline, spark)
    return findings


def preflight(pipeline: Pipeline) -> list[Finding]:
    """Check source, tables, publication, sink and state of a pipeline; changes nothing.

    :returns: the findings in the order of the checks; pass them to :func:`.require` to go on only if all is well.
    """
    if pipeline.topics is not None:
        from airflow_cdc_provider.engine.sources.kafka.provisioning import check

        return check(pipeline)
    checks = Checks()
    with ExitStack() as stack:

        def open_connection(role: str, dsn: str) -> Connection | None:
            def opened() -> Connection:
                return stack.enter_context(closing(connect(dsn, "airflow-cdc preflight")))

            return checks.run(role, opened, lambda _: f"{role} {describe(dsn)} is reachable.")

        source = open_connection("source", pipeline.source.dsn)
        tables: tuple[Table, ...] | None = None
        if source is not None and check_settings(checks, source, pipeline.source):
            tables = checks.run(
                "tables",
                lambda: resolve(source, pipeline.source.tables),
                lambda found: f"Tables that can be captured: {len(found)}.",
            )
            if tables is not None:
                for name, table_check in _TABLE_CHECKS.items():
                    checks.run(name, partial(table_check, source, pipeline, tables))
        for branch in pipeline.branches:
            if tables is not None:
                checks.run("targets", partial(_target_names, branch, tables))
        records = check_beside_source(checks, pipeline, source, tables)
        if source is not None:
            check_continuation(checks, pipeline, source, records)
    return checks.findings


def check_beside_source(
    checks: Checks, pipeline: Pipeline, source: Connection | None, tables: Sequence[Table] | None
) -> list[Record]:
    """Check sinks and state.

    :param source, tables: see :meth:`.SinkSettings.check`.
    :returns: the commit records of the sinks that have one; those of sinks that cannot be asked are not among them.
    """
    records = []
    for branch in pipeline.branches:
        with suppress(CdcError, *DRIVER_ERRORS):  # what is wrong with a record is a matter of provisioning
            if (record := sink_of(branch).record()) is not None:
                records.append(record)
                if checks.run("mode", partial(require_mode, branch, record.identity)) is None:
                    continue  # what stands in the way of the other mode does not matter
        if tables is not None:
            checks.run("names", partial(changelog_names, branch, tables))
        branch.sink.check(checks, source, branch, tables)
    if len(pipeline.sinks) > 1:
        checks.run("sinks", partial(_sinks, pipeline))
    checks.run("state", partial(_state, pipeline))
    if pipeline.metrics.prometheus is not None:
        checks.run("metrics", partial(require_client, pipeline))
    return records


def check_continuation(
    checks: Checks, pipeline: Pipeline, source: Connection | None, records: Sequence[Record]
) -> None:
    """Check that the source can continue what the sinks have.

    :param source: see :func:`.require_source`.
    :param records: see :func:`check_beside_source`.
    """
    if records:
        checks.run("continuation", lambda: require_source(pipeline, source, records))


def require_mode(branch: Pipeline, identity: Mapping[str, Any]) -> str:
    """Refuse another mode than that of what has been written, which the file may not change.

    :param identity: of the commit record.
    :returns: a sentence.
    :raises ConfigError: naming both.
    """
    if identity["mode"] != branch.sink.mode:
        raise ConfigError(
            f"sink.mode: {branch.sink.mode!r}, but the pipeline has been provisioned as {identity['mode']!r}"
            f" in {branch.sink.place}",
            "Put the mode back, or use another pipeline name for the other mode.",
        )
    return f"What has been written to {branch.sink.place} is a {branch.sink.mode}, as the file has it."


def target_name(pipeline: Pipeline, table: Table) -> tuple[str, str]:
    """Schema and name of the target of a source table."""
    return pipeline.sink.schema.replace("{schema}", table.schema), table.name


def _publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """As :func:`check_publication`, before the record has been read, which tells what is captured already."""
    query = "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    settled = () if rows(source, query, [pipeline.source.slot]) else tables
    return check_publication(source, pipeline, tables, settled)


def check_publication(source: Connection, pipeline: Pipeline, tables: Sequence[Table], settled: Sequence[Table]) -> str:
    """Check that the publication can be made, or is there and publishes what is captured.

    :param settled: those of the tables, with those of their leaves, that the role does not publish anew.
    """
    name = pipeline.source.publication
    quoted = sql.Identifier(name).as_string(source)
    statement = publication_sql(source, name, tables)
    not_owned = leaves_where(source, tables, "NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')")
    is_ours = find_publication(source, name)
    if is_ours is None:
        if not_owned:
            raise MissingPrivilege(
                f"publication {name!r} does not exist, and role {quoted_user(source)} cannot create it because it does"
                f" not own {', '.join(not_owned)}",
                f"Let the tables' owner, with CREATE on the database, or a superuser run: {statement}",
            )
        return may_create_publication(source, name)
    missing, different = published_otherwise(source, name, tables)
    fixed = published_otherwise(source, name, settled)[1]
    if fixed or ((missing or different) and (not_owned or not is_ours)):
        shown = ", ".join(f"{leaf.schema}.{leaf.name}" for leaf in different or missing)
        what = "publishes other columns or rows of" if different else "lacks"
        body = statement.partition(" FOR ")[2].rpartition(" WITH ")[0]
        raise MissingPrivilege(
            f"publication {name!r} {what} {shown}", f"Let its owner run: ALTER PUBLICATION {quoted} SET {body};"
        )
    if missing or different:
        takes_writes(source)
        return f"Publication {name!r} exists, tables will be added to it."
    return f"Publication {name!r} exists and has all tables."


def _sinks(pipeline: Pipeline) -> str:
    """Check that no store is named twice: it has one commit record for a pipeline."""
    places = Counter((sink.type, sink.place) for sink in pipeline.sinks)
    for (_, place), count in places.items():
        if count > 1:
            raise ConfigError(f"sink: {place} is named twice", "Fill it a second time by a pipeline of another name.")
    return "No sink is named twice."


def _target_names(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    counts = Counter(target_name(pipeline, table) for table in tables)
    for (schema, name), count in counts.items():
        if count > 1:
            raise ConfigError(
                f"sink.schema: {count} source tables would share the target {schema}.{name}",
                "Use {schema} in sink.schema, or capture one of them in another pipeline.",
            )
    return "Every table has a target of its own."


def changelog_names(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """Refuse columns of names that a changelog gives columns of its own."""
    for table in tables if pipeline.sink.mode == "changelog" else ():
        if taken := sorted(CHANGELOG_NAMES & {column.name for column in table.columns}):
            key = "source.tables" if pipeline.topics is None else "source.sql"
            raise ConfigError(
                f"{key}: {table.label} has columns of the names {', '.join(taken)}, which the changelog gives columns"
                " of its own",
                "Leave them out with `columns`, rename them at the source, or use sink.mode: mirror."
                if pipeline.topics is None
                else "Give them other names with AS, or use sink.mode: mirror.",
            )
    return "No column has a name that the changelog needs."


def _state(pipeline: Pipeline) -> str:
    """Check that the state directory can be made or written, without making it, and is the pipeline's alone."""
    url = pipeline.state
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            folder = Path(unquote(parts.path))
            while not os.path.lexists(folder):
                folder = folder.parent
            # A file without a name: the only sure test, since root passes every look at permissions.
            with tempfile.TemporaryFile(dir=folder):
                pass
        else:
            _list_nearest(url)
    except Exception as e:  # object stores raise classes of their own
        raise StateUnwritable(f"state {url} cannot be written: {e}", state_remedy(getattr(e, "errno", None))) from e
    require_own(State(url), pipeline.name)
    return f"State {url} can be written."


def _list_nearest(url: str) -> None:
    """List the nearest folder that exists, at the latest the root or bucket.

    :raises FileNotFoundError: when not even that exists.
    """
    system, path = fsspec.url_to_fs(url)
    while True:
        try:
            system.ls(path, detail=False)
            return
        except FileNotFoundError:
            parent = system._parent(path)
            if parent == path or not parent:  # a bucket has no parent
                raise
            path = parent


_TABLE_CHECKS: dict[str, Callable[[Connection, Pipeline, Sequence[Table]], str]] = {
    "select": lambda source, pipeline, tables: may_read(source, tables),
    "row security": lambda source, pipeline, tables: sees_all_rows(source, tables),
    "publication": _publication,
}
