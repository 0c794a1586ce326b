"""The snapshot as tasks: its chunks in groups, and a Spark job for each group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.chunk_ranges import part_of, plan_groups
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.spark import CdcSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

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
        from airflow_cdc_provider.engine import commands

        try:
            groups = int(self.groups)
        except ValueError:
            groups = 0
        if groups < 1:
            raise failure(f"the argument groups is {self.groups!r}", "Give a whole number from 1 on.", "fail")
        with airflow_failures(self.pipeline, "plan"):
            unfinished = commands.unfinished(load_pipeline(self.pipeline).pipeline)
        self.log.info("%s chunks are not finished.", len(unfinished))
        return plan_groups(unfinished, groups)


class CdcSnapshotOperator(CdcSparkOperator):
    """A Spark job that copies the chunks of one group, except those that an earlier try has finished.

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
    :param deferrable: whether to wait in the triggerer; otherwise the task occupies a worker slot while it waits.
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

    def stopped_result(self) -> dict[str, Any]:
        """Return the result of a snapshot that was stopped before its first chunk."""
        chunks = sum(last - first + 1 for _, first, last in self.group["chunks"])
        return {"chunks": chunks, "finished": 0, "rows": 0, "seconds": 0.0}

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Record the tables of the group."""
        self.record_flows(pipeline, {table for table, _, _ in self.group["chunks"]})
