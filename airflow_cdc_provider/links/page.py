"""The link from a task to its pipeline on the CDC page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class CdcPageLink(BaseOperatorLink):
    """A link to the page "CDC" of Airflow that shows the pipeline of the task."""

    name = "CDC page"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address, without a pipeline if the pipeline's name is unknown."""
        page = f"{base_url()}/plugin/cdc"
        try:
            name = Pipeline.outline(getattr(operator, "pipeline", "")).name
        except ConfigError:
            return page
        return f"{page}?{urlencode({'pipeline': name})}"


def base_url() -> str:
    """Return the address of Airflow's user interface."""
    return str(conf.get("api", "base_url", fallback="")).rstrip("/")
