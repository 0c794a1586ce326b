"""The snapshot as tasks: its chunks in groups, and a Spark job for each group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.chunk_ranges import Range, part_of, plan_groups
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.spark import CdcSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import Logger

    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline


class CdcPlanOperator(CdcOperator):
    """A plan that divides the unfinished chunks into groups, over which the snapshot is mapped.

    There are only few groups, whatever the number of chunks: each group has its chunks as ranges.

    :param pipeline: path of the pipeline file. (templated)
    :param groups: the maximum number of groups, each of which is a separate Spark application. (templated)
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "groups")

    def __init__(self, *, groups: int | str = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.groups = groups

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Return the groups, each with a ``label`` and its ``chunks``; there are none if all chunks are finished."""
        groups = as_groups(self.groups)
        with airflow_failures(self.pipeline, "plan"):
            return plan(load_pipeline(self.pipeline).pipeline, groups, self.log)


def as_groups(value: int | str) -> int:
    """Parse a number of groups; raise the failure of the task if it is invalid."""
    try:
        groups = int(value)
    except ValueError:
        groups = 0
    if groups < 1:
        raise failure(f"the argument groups is {value!r}", "Give a whole number from 1 on.", "fail")
    return groups


def plan(pipeline: Pipeline, groups: int, log: Logger) -> list[dict[str, Any]]:
    """Divide the unfinished chunks of a pipeline into groups; chunks that need no Spark are one group."""
    from airflow_cdc_provider.engine import commands
    from airflow_cdc_provider.engine.commands.copying import copy_needs_spark

    unfinished = commands.unfinished(pipeline)
    log.info("%s chunks are not finished.", len(unfinished))
    return plan_groups(unfinished, groups if unfinished and copy_needs_spark(pipeline) else 1)


class CdcSnapshotOperator(CdcSparkOperator):
    """A copy of the chunks of one group, except those that an earlier try has finished, by a Spark job.

    Few rows are copied by the task's own process, see ``spark.min_rows`` and ``spark.min_bytes`` of the pipeline file.

    Map it over the result of :class:`CdcPlanOperator`::

        CdcSnapshotOperator.partial(
            task_id="snapshot",
            pipeline=path,
            epoch=provision.output["epoch"],
            map_index_template="{{ task.group['label'] }}",
        ).expand(group=plan.output)

    :param group: a group of the plan. (templated)
    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master overrides that of the pipeline file.
    :param conf: Spark configuration that overrides the pipeline's ``spark.conf``. (templated)
    :param deferrable: whether to wait in the triggerer, see :func:`.default_deferrable`; otherwise the task occupies a
        worker slot while it waits.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "group")
    command = "snapshot"
    # Each chunk is committed only once, whichever job does it; concurrent jobs have the same epoch.
    resumes_epoch = True

    def __init__(self, *, group: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = group

    @property
    def part(self) -> str:
        """Return the part's name, which depends on the chunks, so that groups are never confused."""
        return part_of(self.group["chunks"])

    def command_arguments(self) -> list[str]:
        """Return the option for the chunks."""
        return ["--chunks", json.dumps(self.group["chunks"])]

    def needs_spark(self, pipeline: Pipeline) -> bool:
        """Return whether the group has many rows or bytes that are not copied."""
        from airflow_cdc_provider.engine.commands.copying import copy_needs_spark

        return copy_needs_spark(pipeline, self._ranges)

    def command_here(self, pipeline: Pipeline, epoch: int | None) -> dict[str, Any]:
        """Copy the chunks in this process."""
        from airflow_cdc_provider.engine import commands

        return commands.snapshot(pipeline, epoch=epoch, chunks=self._ranges, spark=False)

    @property
    def _ranges(self) -> list[Range]:
        return [(table, first, last) for table, first, last in self.group["chunks"]]

    def stopped_result(self) -> dict[str, Any]:
        """Return the result of a snapshot that was stopped before its first chunk."""
        chunks = sum(last - first + 1 for _, first, last in self.group["chunks"])
        return {"chunks": chunks, "finished": 0, "rows": 0, "seconds": 0.0}

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Record the tables of the group."""
        self.record_flows(pipeline, {table for table, _, _ in self.group["chunks"]})
