"""The link from a task to what Spark shows of its job."""

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
    """The UI of a Spark job while it lives, and its page on the history server afterwards.

    Airflow stores a link when a task defers, before there is a UI. So it leads to the page's endpoint, which knows.
    """

    name = "Spark UI or history server"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty, which shows no link, where the task has no job."""
        submission = getattr(operator, "submission", None)
        if submission is None:
            return ""
        try:
            name = Pipeline.outline(getattr(operator, "pipeline", "")).name
        except ConfigError:
            return ""
        address = f"{base_url()}/cdc/api/pipelines/{quote(name)}/spark/{quote(submission)}"
        # The state forgets a job some time after its end; the link of a task does not.
        application = getattr(operator, "application", None)
        return f"{address}?{urlencode({'application': application})}" if application else address
