"""Removing a pipeline as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.hooks.cdc import airflow_failures, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CdcDropOperator(CdcOperator):
    """Removes a pipeline's slot, publication, state, sink record and staging; never target tables.

    Let :class:`.CdcApprovalOperator` ask before. Returns what may be ``left`` on a source that is gone.

    :param pipeline: path of the pipeline file. (templated)
    :param takeover: go on although a job of the pipeline is alive; it is fenced.
    :param source_gone: go on if the source cannot be reached; its slot keeps log if it ever comes back.
    """

    def __init__(self, *, takeover: bool = False, source_gone: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.takeover = takeover
        self.source_gone = source_gone

    def execute(self, context: Context) -> dict[str, Any]:
        """Remove; returns the pipeline's name and the statements that remove what is left."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures(self.pipeline, "drop", ends_run=False):
            result = commands.drop(
                load_pipeline(self.pipeline).pipeline, takeover=self.takeover, source_gone=self.source_gone
            )
        for statement in result["left"]:
            self.log.warning("Run on the source if it ever comes back: %s;", statement)
        return result
