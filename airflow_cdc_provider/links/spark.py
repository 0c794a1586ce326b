"""The link from a task to Spark's page of its job."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.links.page import base_url

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class SparkUiLink(BaseOperatorLink):
    """A link to the UI of a Spark job while it is alive, and to its page on the history server afterwards.

    Airflow stores a link when a task defers, before there is a UI. Therefore the link leads to an endpoint of the page
    CDC, which redirects to the UI.
    """

    name = "Spark UI or history server"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address; empty, which hides the link, if the task has no job."""
        submission = getattr(operator, "submission", None)
        if submission is None:
            return ""
        try:
            name = Pipeline.outline(getattr(operator, "pipeline", "")).name
        except ConfigError:
            return ""
        address = f"{base_url()}/cdc/api/pipelines/{quote(name)}/spark/{quote(submission)}"
        # The state keeps a job only for some time after its end, but the link of a task remains.
        application = getattr(operator, "application", None)
        return f"{address}?{urlencode({'application': application})}" if application else address
