"""Runs the stream as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.assets import CHANGED_TABLES, announce_changes, announce_views
from airflow_cdc_provider.engine.core.stream_end import CAUGHT_UP, Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.views import read_view_marks
from airflow_cdc_provider.operators.spark import CdcSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CdcStreamOperator(CdcSparkOperator):
    """A Spark job that applies the source's changes until a given end.

    A short catch-up is done by the task's own process, see ``spark.min_bytes`` of the pipeline file.

    With ``forever`` it runs without end and occupies no worker. It ends after ``airflow-cdc stop``, or when the task is
    marked or cleared.

    :param until: ``caught up``, ``forever`` (formerly ``stopped``), or an LSN, ``X/Y`` or ``lsn:X/Y``. (templated)
    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned; without one the stream takes the pipeline's next. (templated)
    :param spark_conn_id: the Spark connection; its master overrides that of the pipeline file.
    :param conf: Spark configuration that overrides the pipeline's ``spark.conf``. (templated)
    :param deferrable: whether to wait in the triggerer, see :func:`.default_deferrable`; otherwise the task occupies a
        worker slot while it waits.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "until")
    command = "stream"
    part = "stream"
    # The sink cannot distinguish two streams of one epoch, so a new stream must fence one that may still be running.
    resumes_epoch = False
    moves_views = True

    def __init__(self, *, until: str = CAUGHT_UP, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until = until
        self.outlets = [*self.outlets, CHANGED_TABLES]

    def command_arguments(self) -> list[str]:
        """Return the option for the end."""
        return ["--until", str(Ending.parse(self.until))]

    def needs_spark(self, pipeline: Pipeline) -> bool:
        """Return whether the end is far away or unknown."""
        from airflow_cdc_provider.engine.commands.following import follow_needs_spark

        return follow_needs_spark(pipeline, Ending.parse(self.until))

    def command_here(self, pipeline: Pipeline, epoch: int | None) -> dict[str, Any]:
        """Apply the changes in this process."""
        from airflow_cdc_provider.engine import commands

        return commands.stream(pipeline, until=str(Ending.parse(self.until)), epoch=epoch, spark=False)

    def stopped_result(self) -> dict[str, Any]:
        """Return the result of a stream that was stopped; its position is unknown."""
        unknown = dict.fromkeys(("applied_lsn", "lag_bytes", "lag_seconds"))
        return {**unknown, "changes": 0, "tables": {}, "caught_up": False}

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Add an event for each table that has changed, and for each view that has moved since the work began."""
        super().completed(context, pipeline, result)
        announce_changes(context, pipeline.name, result)
        marks = read_view_marks(pipeline)
        announce_views(context, pipeline.name, self.views_before(context), marks, result["applied_lsn"])
