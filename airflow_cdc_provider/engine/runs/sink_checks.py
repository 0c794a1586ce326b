"""What is checked of a pipeline's sinks, whatever its source is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.core.findings import Checks
from airflow_cdc_provider.engine.core.record import CHANGELOG_NAMES, Record, Target
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.pipeline.registry import sink_plugin
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.commit_records import sink_of


def check_sinks(
    checks: Checks, pipeline: Pipeline, tables: Sequence[Table] | None, source: SourceIdentity | None
) -> list[Record]:
    """Check the sinks of a pipeline; changes nothing.

    :param tables: that would be captured; ``None`` when they are not known.
    :param source: see :meth:`.SinkPlugin.check`.
    :returns: the commit records of the sinks that have one; those of sinks that cannot be asked are not among them.
    """
    records = []
    for branch in pipeline.branches:
        with suppress(CdcError, *DRIVER_ERRORS):  # what is wrong with a record is a matter of provisioning
            if (record := sink_of(branch).record()) is not None:
                records.append(record)
                if checks.run("mode", partial(require_mode, branch, record.identity)) is None:
                    continue  # what stands in the way of the other mode does not matter
        check_targets(checks, branch, tables, source)
    if len(pipeline.sinks) > 1:
        checks.run("sinks", partial(_sinks, pipeline))
    return records


def check_targets(
    checks: Checks, branch: Pipeline, tables: Sequence[Table] | None, source: SourceIdentity | None
) -> None:
    """Check a sink, and the targets of tables in it; see :func:`check_sinks`."""
    if tables is not None:
        checks.run("names", partial(changelog_names, branch, tables))
    plugin, targets = sink_plugin(branch.sink.type), None if tables is None else targets_of(branch, tables)
    plugin.check(branch.sink, checks, branch.name, targets, source)


def targets_of(branch: Pipeline, tables: Sequence[Table]) -> list[Target]:
    """Return the targets of tables in the sink of a branch."""
    return [target_for(branch, table) for table in tables]


def target_for(branch: Pipeline, table: Table) -> Target:
    """Return the target of a table in the sink of a branch, as it is defined after the pipeline's row transform."""
    return Target(branch.transform.table(table), *target_name(branch, table))


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


def _sinks(pipeline: Pipeline) -> str:
    """Check that no store is named twice: it has one commit record for a pipeline."""
    places = Counter((sink.type, sink.place) for sink in pipeline.sinks)
    for (_, place), count in places.items():
        if count > 1:
            raise ConfigError(f"sink: {place} is named twice", "Fill it a second time by a pipeline of another name.")
    return "No sink is named twice."


def require_own_targets(pipeline: Pipeline, tables: Sequence[Table]) -> str:
    """Refuse two tables that would share a target.

    :returns: a sentence.
    :raises ConfigError: naming the target.
    """
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
            raise ConfigError(
                f"{pipeline.source.columns_key}: {table.label} has columns of the names {', '.join(taken)}, which the"
                " changelog gives columns of its own",
                "Leave them out with `columns`, rename them at the source (in `sql` by AS), or use sink.mode: mirror.",
            )
    return "No column has a name that the changelog needs."
