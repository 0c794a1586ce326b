"""Removes a pipeline as a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.hooks.cdc import airflow_failures, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class CdcDropOperator(CdcOperator):
    """The removal of a pipeline's slot, publication, state, commit record and staging, but not of target tables.

    Put a :class:`.CdcApprovalOperator` before it. The result's ``left`` has statements for objects that may be left on
    an unreachable source.

    :param pipeline: path of the pipeline file. (templated)
    :param takeover: whether to continue even if a job of the pipeline is alive; the job is fenced.
    :param source_gone: whether to continue if the source cannot be reached; if it ever comes back, its slot retains
        log.
    """

    def __init__(self, *, takeover: bool = False, source_gone: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.takeover = takeover
        self.source_gone = source_gone

    def execute(self, context: Context) -> dict[str, Any]:
        """Remove the pipeline; return its name and the statements that remove leftover objects."""
        from airflow_cdc_provider.engine import commands

        with airflow_failures(self.pipeline, "drop", ends_run=False):
            result = commands.drop(
                load_pipeline(self.pipeline).pipeline, takeover=self.takeover, source_gone=self.source_gone
            )
        for statement in result["left"]:
            self.log.warning("If the source ever comes back, run on it: %s;", statement)
        return result
