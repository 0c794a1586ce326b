"""The steps of a pipeline that need no Spark job: preflight, provision, verify, maintain.

Each operator wraps one command of the engine. Errors of the engine fail the task with a remedy, and are retried only if
a retry can help.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import Logger

    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

_DIFFERENCES_SHOWN = 10


class CdcPreflightOperator(CdcOperator):
    """A check of everything that the pipeline needs; it changes nothing.

    :param pipeline: path of the pipeline file. (templated)
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks and log them; return the findings, or fail with all errors."""
        with airflow_failures(self.pipeline, "preflight"):
            return check(load_pipeline(self.pipeline).pipeline, self.log)


def check(pipeline: Pipeline, log: Logger) -> dict[str, Any]:
    """Run all checks of a pipeline, log and return the findings.

    :raises CdcError: if a check fails; has all errors.
    """
    from airflow_cdc_provider.engine.commands import findings_dict
    from airflow_cdc_provider.engine.commands.attention import noting_errors
    from airflow_cdc_provider.engine.commands.checks import preflight_whole
    from airflow_cdc_provider.engine.core.findings import combined

    with noting_errors(pipeline, "preflight"):
        findings = preflight_whole(pipeline)
        for finding in findings:
            level = logging.INFO if finding.mark == "✓" else logging.WARNING if finding.ok else logging.ERROR
            for line in finding.lines():
                log.log(level, "%s", line)
        error = combined(findings)
        if error is not None:
            raise error
    return {"findings": [findings_dict(finding) for finding in findings]}


class CdcProvisionOperator(CdcOperator):
    """A step that creates or verifies publication, slot, plan and commit record, and takes the epoch.

    Its result has ``epoch``, which snapshot and stream need, and the slot's ``restart_lsn`` and ``confirmed_flush_lsn``
    from before they ran.

    :param pipeline: path of the pipeline file. (templated)
    :param takeover: whether to take the epoch even from a run that is alive.
    """

    def __init__(self, *, takeover: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.takeover = takeover

    def execute(self, context: Context) -> dict[str, Any]:
        """Provision; return epoch, start of the stream, positions of the slot, tables and number of chunks."""
        with airflow_failures(self.pipeline, "provision"):
            return provision(load_pipeline(self.pipeline).pipeline, self.log, takeover=self.takeover)


def provision(pipeline: Pipeline, log: Logger, *, takeover: bool = False, checked: bool = False) -> dict[str, Any]:
    """Provision a pipeline, and log and return what was created or found.

    :param checked: whether the checks of preflight have just passed.
    """
    from airflow_cdc_provider.engine import commands

    result = commands.provision(pipeline, takeover=takeover, checked=checked)
    log.info(
        "Epoch %s: %s tables in %s chunks, streamed from %s.",
        result["epoch"],
        len(result["tables"]),
        result["chunks"],
        result["applied_lsn"],
    )
    return result


class CdcVerifyOperator(CdcOperator):
    """A comparison of source and sink that fails if they differ.

    :param pipeline: path of the pipeline file. (templated)
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Compare; return the tables and views with their numbers of rows."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures(self.pipeline, "verify", ends_run=False):
            result = commands.verify(load_pipeline(self.pipeline).pipeline)
        for table in result["tables"]:
            self.log.info(
                "%s: %s rows in the source, %s in the sink%s, %s.",
                table["table"],
                table["source_rows"],
                table["target_rows"],
                f" {table['sink']}" if "sink" in table else "",
                "equal" if table["equal"] else "different",
            )
        for view in result.get("views", ()):
            self.log.info(
                "view %s: %s rows, %s.", view["view"], view["rows"], "equal" if view["equal"] else "different"
            )
        if not result["equal"]:
            different = [table for table in result["tables"] if not table["equal"]]
            views = [view["view"] for view in result.get("views", ()) if not view["equal"]]
            lines = ["Source and sink differ.", *map(_describe_difference, different)] if different else []
            lines += [f"View {view} is not what its SELECT returns." for view in views]
            if result.get("lag_bytes") and not result.get("live"):
                lines.append(
                    f"No stream is running, and {human_bytes(result['lag_bytes'])} of WAL are not applied yet:"
                    " let a stream catch up, and compare again."
                )
            if views:
                lines.append(
                    "Something else has changed the view's table. Drop the table, and run the pipeline: the view is"
                    " built again."
                )
            if different and "ranges" not in result:
                lines.append(_remedy([table["table"] for table in different]))
            raise AirflowFailException("\n".join(lines))
        return result


class CdcMaintainOperator(CdcOperator):
    """A step that merges small files in file-based sinks, and removes files that no reader needs any more.

    The pipeline's jobs may keep running. Sinks that need no maintenance are not changed. If a sink uses Spark, it runs
    in the worker's process with the ``spark`` section of the pipeline file.

    :param pipeline: path of the pipeline file. (templated)
    :param retention: how long replaced files are kept, in seconds or as text such as ``8h``; each store's own setting
        by default. (templated)
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "retention")

    def __init__(self, *, retention: float | str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.retention = retention

    def execute(self, context: Context) -> dict[str, Any]:
        """Maintain the sinks; return the actions taken in each of them."""
        from airflow_cdc_provider.engine import commands
        from airflow_cdc_provider.engine.core.section_values import as_seconds

        try:
            retention = None if self.retention is None else as_seconds(self.retention)
        except ValueError as e:
            raise failure(f"the argument retention is {self.retention!r}", f"Give {e}.", "fail") from e
        with airflow_failures(self.pipeline, "maintain", ends_run=False):
            result = commands.maintain(load_pipeline(self.pipeline).pipeline, retention)
        for sink in result["sinks"]:
            self.log.info("%s: %s", sink["sink"], sink["done"])
        return result


def _remedy(tables: Sequence[str]) -> str:
    tables = list(dict.fromkeys(tables))  # a table may differ in several sinks
    options = " ".join(f"--table {table}" for table in tables)
    return (
        f"To repair the copy, trigger the Dag cdc_resnapshot with Tables: {', '.join(tables)}; a Condition limits it to"
        f" some of the rows. Or run `airflow-cdc resnapshot {options}`."
    )


def _describe_difference(table: Mapping[str, Any]) -> str:
    differences = table["differences"]
    shown = [f"{difference['kind']} {_describe_key(difference['key'])}" for difference in differences]
    more = table.get("difference_count", len(shown)) - _DIFFERENCES_SHOWN
    listed = ", ".join([*shown[:_DIFFERENCES_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    sink = f"the sink {table['sink']}" if "sink" in table else "the sink"
    return f"{table['table']}: {table['source_rows']} rows in the source, {table['target_rows']} in {sink}: {listed}"


def _describe_key(key: object) -> str:
    return ", ".join(_key_parts(key)) or "a row"


def _key_parts(key: object) -> Iterator[str]:
    if isinstance(key, Mapping):
        yield from (f"{name}={value}" for name, value in key.items())
    elif isinstance(key, list | tuple):
        yield f"({', '.join(map(str, key))})"
    elif key is not None:
        yield str(key)
