"""Asking a human before a step that destroys something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.text_output import human_bytes
from airflow_cdc_provider.hooks.cdc import airflow_failures, load_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context

_SUBJECTS = {
    "resnapshot": "Start pipeline {name} over: new slot, all tables read again?",
    "drop": "Remove pipeline {name}?",
}
_DEEDS = {
    "resnapshot": "**Publication and slot are dropped and made anew, and all tables are read again.** Until a table has"
    " been read, its target keeps the rows that it has and falls behind; then they are replaced in one transaction."
    " What the slot still retains is given up, as the new rows contain it.",
    "drop": "**Slot, publication, state, the record in the sink and all staging are removed.** The target tables stay"
    " as they are, and are not kept equal any more. To go on later, the tables have to be copied again, into empty"
    " targets.",
}


class CdcApprovalOperator(ApprovalOperator):
    """Asks for approval, in Airflow's required actions, and says what will happen to which tables.

    When it is rejected, all tasks that follow are skipped.

    :param pipeline: path of the pipeline file. (templated)
    :param action: what follows: ``resnapshot`` (of everything) or ``drop``.
    :param required: whether to ask at all: a boolean, or a template that gives ``True`` or ``False``. (templated)
    """

    template_fields = (*ApprovalOperator.template_fields, "pipeline", "required")

    def __init__(self, *, pipeline: str, action: str, required: bool | str = True, **kwargs: Any) -> None:
        if action not in _SUBJECTS:
            raise ValueError(f"action is {action!r}, not one of: {', '.join(_SUBJECTS)}")
        super().__init__(subject=_SUBJECTS[action], ignore_downstream_trigger_rules=True, **kwargs)
        self.pipeline = pipeline
        self.action = action
        self.required = required

    def execute(self, context: Context) -> Any:
        """Describe what will happen, and wait for the answer."""
        if str(self.required) == "False":
            self.log.warning("Nobody is asked, as approval is not required.")
            return None
        from airflow_cdc_provider.engine import commands

        with airflow_failures():
            pipeline = load_pipeline(self.pipeline).pipeline
        try:
            status: Mapping[str, Any] = commands.status(pipeline)
        except CdcError as e:  # what is broken may be why this is done
            status = {"unreachable": {"pipeline": e.message}}
        self.subject = _SUBJECTS[self.action].format(name=pipeline.name)
        self.body = describe(self.action, status)
        self.log.info("%s\n%s", self.subject, self.body)
        return super().execute(context)


def describe(action: str, status: Mapping[str, Any]) -> str:
    """What will happen to a pipeline with this status, in Markdown."""
    lines = [_DEEDS[action], ""]
    lines += [f"* {table['table']}: {table['rows']:,} rows when copied" for table in status.get("tables", ())]
    if slot := status.get("slot"):
        lines.append(f"* slot: {human_bytes(slot['retained_bytes'] or 0)} of log retained, {slot['wal_status']}")
    if jobs := status.get("jobs"):
        lines.append(f"* at work: {', '.join(job['part'] for job in jobs)}; it has to be stopped first")
    lines += [f"* {server} cannot be reached: {message}" for server, message in status.get("unreachable", {}).items()]
    if error := status.get("last_error"):
        lines.append(f"* last error: {error['message']}")
    return "\n".join(lines)
