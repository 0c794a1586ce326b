"""The snapshot as tasks: its chunks in groups, a Spark job a group."""

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
    """Divides the chunks that are not finished into groups to map the snapshot over.

    Few groups, whatever the number of chunks: each names the chunks that are its own by ranges.

    :param pipeline: path of the pipeline file. (templated)
    :param groups: how many groups at most, each a Spark application of its own. (templated)
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "groups")

    def __init__(self, *, groups: int | str = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.groups = groups

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Return the groups, each with a ``label`` and its ``chunks``; none when all chunks are finished."""
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
    """Copies the chunks of one group; what an earlier try finished is not copied again.

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
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param deferrable: wait in the triggerer; otherwise in the worker, whose slot is taken for as long.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "group")
    command = "snapshot"
    # Its chunks are committed each once, by whichever job; the jobs beside it are of the same epoch.
    resumes_epoch = True

    def __init__(self, *, group: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group = group

    @property
    def part(self) -> str:
        """Named after the chunks, so that no two groups are taken for each other."""
        return part_of(self.group["chunks"])

    def command_arguments(self) -> list[str]:
        """The chunks."""
        return ["--chunks", json.dumps(self.group["chunks"])]

    def stopped_result(self) -> dict[str, Any]:
        """As of a snapshot that was stopped before its first chunk."""
        chunks = sum(last - first + 1 for _, first, last in self.group["chunks"])
        return {"chunks": chunks, "finished": 0, "rows": 0, "seconds": 0.0}

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Note the tables of the group."""
        self.record_flows(pipeline, {table for table, _, _ in self.group["chunks"]})
