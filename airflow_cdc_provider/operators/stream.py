"""The stream as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.assets import CHANGED_TABLES, announce_changes
from airflow_cdc_provider.engine.core.stream_end import CAUGHT_UP, Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.operators.spark import CdcSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CdcStreamOperator(CdcSparkOperator):
    """Applies the source's changes until the given point.

    With ``forever`` it goes on for days and occupies no worker: it ends by ``airflow-cdc stop``, or when the task is
    marked or cleared.

    :param until: ``caught up``, ``forever`` (formerly ``stopped``), or an LSN, ``X/Y`` or ``lsn:X/Y``. (templated)
    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned; without one the stream takes the pipeline's next. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param deferrable: wait in the triggerer; otherwise in the worker, whose slot is taken for as long.
    """

    template_fields: Sequence[str] = (*CdcSparkOperator.template_fields, "until")
    command = "stream"
    part = "stream"
    # Two streams of one epoch are not told apart by the sink, so one that may have been left behind must be overtaken.
    resumes_epoch = False

    def __init__(self, *, until: str = CAUGHT_UP, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until = until
        self.outlets = [*self.outlets, CHANGED_TABLES]

    def command_arguments(self) -> list[str]:
        """Where to end."""
        return ["--until", str(Ending.parse(self.until))]

    def stopped_result(self) -> dict[str, Any]:
        """As of a stream that was stopped; where it was then, nobody has said."""
        unknown = dict.fromkeys(("applied_lsn", "lag_bytes", "lag_seconds"))
        return {**unknown, "changes": 0, "tables": {}, "caught_up": False}

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Leave an event for each table that has changed."""
        super().completed(context, pipeline, result)
        announce_changes(context, pipeline.name, result)
