"""Asks a person for approval before a destructive step."""

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
    "resnapshot": "Start pipeline {name} over with a new slot, and read all tables again?",
    "drop": "Remove pipeline {name}?",
}
_DEEDS = {
    "resnapshot": "**Publication and slot are dropped and created again, and all tables are read again.** Until a table"
    " has been read, its target keeps its rows and falls behind; then they are replaced in one transaction. The log"
    " that the slot still retains is discarded, because the new rows include its changes.",
    "drop": "**Slot, publication, state, the commit record in the sink and all staging are removed.** The target tables"
    " remain as they are, but are not updated any more. To continue later, the tables must be copied again into empty"
    " targets.",
}


class CdcApprovalOperator(ApprovalOperator):
    """A request for approval in Airflow's required actions, which describes the effects and the affected tables.

    If it is rejected, all following tasks are skipped.

    :param pipeline: path of the pipeline file. (templated)
    :param action: the following step: ``resnapshot`` (of everything) or ``drop``.
    :param required: whether to ask at all: a boolean, or a template that renders ``True`` or ``False``. (templated)
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
        """Describe the effects, and wait for the answer."""
        if str(self.required) == "False":
            self.log.warning("No approval is requested because it is not required.")
            return None
        from airflow_cdc_provider.engine import commands

        with airflow_failures():
            pipeline = load_pipeline(self.pipeline).pipeline
        try:
            status: Mapping[str, Any] = commands.status(pipeline)
        except CdcError as e:  # a broken pipeline may be the reason for this step
            status = {"unreachable": {"pipeline": e.message}}
        self.subject = _SUBJECTS[self.action].format(name=pipeline.name)
        self.body = describe(self.action, status)
        self.log.info("%s\n%s", self.subject, self.body)
        return super().execute(context)


def describe(action: str, status: Mapping[str, Any]) -> str:
    """Return a description of the effects on a pipeline with this status, in Markdown."""
    lines = [_DEEDS[action], ""]
    lines += [f"* {table['table']}: {table['rows']:,} rows when copied" for table in status.get("tables", ())]
    if slot := status.get("slot"):
        lines.append(f"* slot: {human_bytes(slot['retained_bytes'] or 0)} of log retained, {slot['wal_status']}")
    if jobs := status.get("jobs"):
        lines.append(f"* running: {', '.join(job['part'] for job in jobs)}; must be stopped first")
    lines += [f"* {server} cannot be reached: {message}" for server, message in status.get("unreachable", {}).items()]
    if error := status.get("last_error"):
        lines.append(f"* last error: {error['message']}")
    return "\n".join(lines)
