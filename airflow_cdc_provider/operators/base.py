"""The base of all operators: pipeline file, retries according to the engine's errors, lineage, link to the page CDC."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, BaseOperatorLink

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.lineage import Flow, facets, read_flows
from airflow_cdc_provider.links.page import CdcPageLink
from airflow_cdc_provider.retry import CDC_RETRY_POLICY

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage


class CdcOperator(BaseOperator):
    """A step of a pipeline.

    :param pipeline: path of the pipeline file. (templated)
    """

    template_fields: Sequence[str] = ("pipeline",)
    operator_extra_links: Collection[BaseOperatorLink] = (CdcPageLink(),)

    def __init__(self, *, pipeline: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        # Set here and not as the parameter's default, because Airflow passes None to mapped operators.
        self.retry_policy = self.retry_policy or CDC_RETRY_POLICY
        self._flows: Collection[Flow] = ()

    def record_flows(self, pipeline: Pipeline, tables: Collection[str] | None = None) -> None:
        """Record for OpenLineage the tables that this task has copied; an unreachable sink does not fail the task.

        :param tables: labels of the source tables; all by default.
        """
        try:
            self._flows = read_flows(pipeline, tables)
        except CdcError as e:
            self.log.warning("The tables of this task are not reported to OpenLineage: %s. %s", e.message, e.solution)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        """Return the facets for OpenLineage's listener; called only if its provider is installed."""
        return facets(self._flows)
