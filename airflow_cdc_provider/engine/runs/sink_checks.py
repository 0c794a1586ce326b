"""Checks of a pipeline's sinks that do not depend on its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import CHANGELOG_NAMES, Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import sink_plugin
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.commit_records import sink_of


def check_sinks(
    checks: Checks, pipeline: Pipeline, tables: Sequence[Table] | None, source: SourceIdentity | None
) -> list[Pipeline]:
    """Check the sinks of a pipeline without changing anything.

    :param tables: the tables that would be captured; ``None`` if they are not known.
    :param source: see :meth:`.SinkPlugin.check`.
    :returns: the branches whose sinks have a commit record and can be reached.
    """
    provisioned = []
    for branch in pipeline.branches:
        with suppress(CdcError, *DRIVER_ERRORS):  # provisioning reports problems of a record
            if (record := sink_of(branch).record()) is not None:
                provisioned.append(branch)
                if checks.run("mode", partial(require_mode, branch, record.identity)) is None:
                    continue  # obstacles to the other mode do not matter
        check_targets(checks, branch, tables, source)
    if len(pipeline.sinks) > 1:
        checks.run("sinks", partial(_sinks, pipeline))
    return provisioned


def check_targets(
    checks: Checks, branch: Pipeline, tables: Sequence[Table] | None, source: SourceIdentity | None
) -> None:
    """Check a sink and the targets of tables in it; see :func:`check_sinks`."""
    if tables is not None:
        checks.run("names", partial(changelog_names, branch, tables))
    plugin, targets = sink_plugin(branch.sink.type), None if tables is None else targets_of(branch, tables)
    plugin.check(branch.sink, checks, branch.name, targets, source)


def targets_of(branch: Pipeline, tables: Sequence[Table]) -> list[Target]:
    """Return the targets of tables in the sink of a branch."""
    return [target_for(branch, table) for table in tables]


def target_for(branch: Pipeline, table: Table) -> Target:
    """Return the target of a table in the sink of a branch, as defined after the pipeline's row transform."""
    return Target(branch.transform.table(table), *target_name(branch, table))


def require_mode(branch: Pipeline, identity: Mapping[str, Any]) -> str:
    """Refuse a mode other than the one that was provisioned, because the mode must not change.

    :param identity: the ``identity`` of the commit record.
    :returns: a sentence.
    :raises ConfigError: if the modes differ; names both.
    """
    if identity["mode"] != branch.sink.mode:
        raise ConfigError(
            f"sink.mode is {branch.sink.mode!r}, but the pipeline has been provisioned as {identity['mode']!r}"
            f" in {branch.sink.place}",
            "Restore the former mode in the file, or use another pipeline name for the new mode.",
        )
    return f"The data in {branch.sink.place} is a {branch.sink.mode}, as configured in the file."


def target_name(pipeline: Pipeline, table: Table) -> tuple[str, str]:
    """Return schema and name of the target of a source table."""
    return pipeline.sink.schema.replace("{schema}", table.schema), table.name


def _sinks(pipeline: Pipeline) -> str:
    """Check that no store is named twice, because it has only one commit record for a pipeline."""
    places = Counter((sink.type, sink.place) for sink in pipeline.sinks)
    for (_, place), count in places.items():
        if count > 1:
            raise ConfigError(f"sink: {place} is named twice", "Use a pipeline of another name to write to it again.")
    return "No sink is named twice."


def require_own_targets(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """Refuse tables that would share a target.

    :returns: a sentence.
    :raises ConfigError: if there are such tables; names the target.
    """
    counts = Counter(target_name(pipeline, table) for table in tables)
    for (schema, name), count in counts.items():
        if count > 1:
            raise ConfigError(
                f"sink.schema: {count} source tables would share the target {schema}.{name}",
                "Use {schema} in sink.schema, or capture one of them in another pipeline.",
            )
    return "Every table has its own target."


def changelog_names(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """Refuse columns whose names a changelog uses for its own columns."""
    for table in tables if pipeline.sink.mode == "changelog" else ():
        if taken := sorted(CHANGELOG_NAMES & {column.name for column in table.columns}):
            raise ConfigError(
                f"{pipeline.source.columns_key}: {table.label} has columns of the names {', '.join(taken)}, which the"
                " changelog uses for its own columns",
                "Exclude them with `columns`, rename them at the source (in `sql` with AS), or use sink.mode: mirror.",
            )
    return "No column has a name that the changelog needs."
