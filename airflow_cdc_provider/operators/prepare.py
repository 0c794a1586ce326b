"""The light steps of a pipeline in one process: preflight, provision and plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.hooks.cdc import airflow_failures, load_pipeline
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.pipeline import check, provision
from airflow_cdc_provider.operators.snapshot import as_groups, plan

if TYPE_CHECKING:
    from airflow.sdk import Context


class CdcPrepareOperator(CdcOperator):
    """The steps preflight, provision and plan, one after the other in one process.

    A process costs more than these steps. Rows of the grid can show each of them nevertheless: give ``steps``, whose
    tasks are empty operators after this task, without callbacks, inlets and outlets. Airflow marks these as successful
    without a process, and each has the XCom that its own operator would return. If a step fails, so does this task.

    The result of this task is that of :class:`.CdcPlanOperator`. The results of all steps are its XComs ``preflight``,
    ``provision`` and ``plan``.

    :param pipeline: path of the pipeline file. (templated)
    :param groups: the maximum number of groups, see :class:`.CdcPlanOperator`. (templated)
    :param steps: for any of ``preflight``, ``provision`` and ``plan``, the id of the task that shows it.
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "groups")

    def __init__(self, *, groups: int | str = 2, steps: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.groups = groups
        self.steps = steps or {}

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Check, provision and plan; return the groups of chunks."""
        groups = as_groups(self.groups)
        with airflow_failures(self.pipeline, "preflight"):
            pipeline = load_pipeline(self.pipeline).pipeline
            self._show(context, "preflight", check(pipeline, self.log))
        with airflow_failures(self.pipeline, "provision"):
            self._show(context, "provision", provision(pipeline, self.log, checked=True))
        with airflow_failures(self.pipeline, "plan"):
            planned = plan(pipeline, groups, self.log)
        self._show(context, "plan", planned)
        return planned

    def _show(self, context: Context, step: str, result: object) -> None:
        """Store the result of a step as an XCom of this task, and of the task that shows the step."""
        from airflow.sdk.execution_time.xcom import XCom

        instance = context["ti"]
        instance.xcom_push(key=step, value=result)
        if step in self.steps:
            XCom.set(
                XCom.XCOM_RETURN_KEY,
                result,
                dag_id=instance.dag_id,
                task_id=self.steps[step],
                run_id=instance.run_id,
                map_index=instance.map_index,
            )
