"""The steps of a pipeline as operators: preflight, provision, plan, snapshot, stream, verify.

Each is a shell over one command of the engine. Errors of the engine fail the task
with what to do about them, and are retried only where trying again can help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.progress import format_bytes
from airflow_cdc_provider.operators.spark import CdcSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

_BARE_LSN = re.compile(r"^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$")
_DIFFERENCES_SHOWN = 10


class CdcPreflightOperator(BaseOperator):
    """Checks everything that the pipeline needs and changes nothing.

    :param pipeline: path of the pipeline file. (templated)
    """

    template_fields: Sequence[str] = ("pipeline",)

    def __init__(self, *, pipeline: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the findings."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures():
            result = commands.preflight(load_pipeline(self.pipeline).pipeline)
        for finding in result["findings"]:
            if finding["ok"] and not finding.get("warning"):
                self.log.info("%s: %s", finding["check"], finding["message"])
            else:
                self.log.warning("%s: %s %s", finding["check"], finding["message"], finding.get("solution", ""))
        return result


class CdcProvisionOperator(BaseOperator):
    """Makes publication, slot, plan and commit record, or verifies those that exist, and takes the epoch.

    Its result carries ``epoch``, which snapshot and stream need, and the slot's
    ``restart_lsn`` and ``confirmed_flush_lsn`` from before they ran.

    :param pipeline: path of the pipeline file. (templated)
    :param takeover: take the epoch even from a run that is alive.
    """

    template_fields: Sequence[str] = ("pipeline",)

    def __init__(self, *, pipeline: str, takeover: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.takeover = takeover

    def execute(self, context: Context) -> dict[str, Any]:
        """Provision; returns epoch, consistent point, positions of the slot, tables and number of chunks."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures():
            result = commands.provision(load_pipeline(self.pipeline).pipeline, takeover=self.takeover)
        self.log.info(
            "Epoch %s: %s tables in %s chunks, consistent from %s.",
            result["epoch"],
            len(result["tables"]),
            result["chunks"],
            result["applied_lsn"],
        )
        return result


class CdcPlanOperator(BaseOperator):
    """Divides the chunks that are not finished into groups to map the snapshot over.

    :param pipeline: path of the pipeline file. (templated)
    :param groups: how many groups at most, each a Spark application of its own. (templated)
    """

    template_fields: Sequence[str] = ("pipeline", "groups")

    def __init__(self, *, pipeline: str, groups: int | str = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.groups = groups

    def execute(self, context: Context) -> list[str]:
        """Return the groups, for example ``["0/2", "1/2"]``; none when all chunks are finished."""
        from airflow_cdc_provider.engine import commands

        try:
            groups = int(self.groups)
        except ValueError:
            groups = 0
        if groups < 1:
            raise failure(f"the argument groups is {self.groups!r}", "Give a whole number from 1 on.", "fail")
        with airflow_failures():
            unfinished = commands.unfinished(load_pipeline(self.pipeline).pipeline)
        self.log.info("%s chunks are not finished.", len(unfinished))
        return plan_groups(len(unfinished), groups)


class CdcSnapshotOperator(CdcSparkOperator):
    """Copies the chunks of one group; what an earlier try finished is not copied again.

    Map it over the result of :class:`CdcPlanOperator`::

        CdcSnapshotOperator.partial(
            task_id="snapshot",
            pipeline=path,
            epoch=provision.output["epoch"],
            map_index_template="group {{ task.group }}",
        ).expand(group=plan.output)

    :param group: the group, ``i/n``. (templated)
    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param application: the main script, by default that of the engine.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "group")
    command = "snapshot"

    def __init__(self, *, group: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = group

    def command_arguments(self) -> list[str]:
        """The group."""
        return ["--group", self.group]


class CdcStreamOperator(CdcSparkOperator):
    """Applies the source's changes until the given point.

    :param until: ``caught-up``, ``stopped``, or an LSN, ``X/Y`` or ``lsn:X/Y``. (templated)
    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param application: the main script, by default that of the engine.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "until")
    command = "stream"

    def __init__(self, *, until: str = "caught-up", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until = until

    def command_arguments(self) -> list[str]:
        """Where to end."""
        return ["--until", f"lsn:{self.until}" if _BARE_LSN.match(self.until) else self.until]


class CdcVerifyOperator(BaseOperator):
    """Compares source and sink, and fails when they differ.

    :param pipeline: path of the pipeline file. (templated)
    """

    template_fields: Sequence[str] = ("pipeline",)

    def __init__(self, *, pipeline: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline

    def execute(self, context: Context) -> dict[str, Any]:
        """Compare; returns the tables with their numbers of rows."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures():
            result = commands.verify(load_pipeline(self.pipeline).pipeline)
        for table in result["tables"]:
            self.log.info(
                "%s: %s rows in the source, %s in the sink, %s.",
                table["table"],
                table["source_rows"],
                table["target_rows"],
                "equal" if table["equal"] else "different",
            )
        if not result["equal"]:
            different = [table for table in result["tables"] if not table["equal"]]
            lines = ["Source and sink differ.", *map(_describe_difference, different)]
            if result.get("lag_bytes") and not result.get("live"):
                lines.append(
                    f"No stream is running, and {format_bytes(result['lag_bytes'])} of WAL are not applied yet."
                )
            raise AirflowFailException("\n".join(lines))
        return result


def plan_groups(unfinished: int, groups: int) -> list[str]:
    """At most ``groups`` groups, and no more than there are chunks for."""
    count = min(groups, unfinished)
    return [f"{index}/{count}" for index in range(count)]


def _describe_difference(table: Mapping[str, Any]) -> str:
    differences = table["differences"]
    shown = [f"{difference['kind']} {_describe_key(difference['key'])}" for difference in differences]
    more = table.get("difference_count", len(shown)) - _DIFFERENCES_SHOWN
    listed = ", ".join([*shown[:_DIFFERENCES_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    return f"{table['table']}: {table['source_rows']} rows in the source, {table['target_rows']} in the sink: {listed}"


def _describe_key(key: object) -> str:
    return ", ".join(_key_parts(key)) or "a row"


def _key_parts(key: object) -> Iterator[str]:
    if isinstance(key, Mapping):
        yield from (f"{name}={value}" for name, value in key.items())
    elif isinstance(key, list | tuple):
        yield f"({', '.join(map(str, key))})"
    elif key is not None:
        yield str(key)
