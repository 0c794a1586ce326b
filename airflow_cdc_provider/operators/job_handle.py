"""The information on its work that a task keeps between tries, and the first action of a try."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.hooks.views import ViewMarks

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.state.submission import Status


@dataclass(frozen=True)
class Handle:
    """The information on its job that a task keeps between tries.

    :param submission: the id of the job's submission; empty while the task's process does the work itself.
    :param fingerprint: hash of the work; needed because the store identifies a mapped task by its index, which may
        belong to other work later.
    :param max_tries: ``max_tries`` of the task instance, which changes when it is cleared, but not on a retry.
    :param failures: number of failed jobs of this work since one of them last committed anything.
    :param result: the result of work that the task's process has done itself, until the task has reported it.
    :param views: the marks of the views before the first job of this work; ``None`` if they have not been read.
    """

    submission: str
    fingerprint: str
    max_tries: int
    failures: int = 0
    views: ViewMarks | None = None
    result: dict[str, Any] | None = None

    def belongs_to(self, fingerprint: str, max_tries: int) -> bool:
        """Return whether this is the handle of given work."""
        return (self.fingerprint, self.max_tries) == (fingerprint, max_tries)

    def follows(self, before: Handle | None) -> Handle:
        """Return this handle with failures and views of the previous one, if that belongs to the same work."""
        if before is None or not before.belongs_to(self.fingerprint, self.max_tries):
            return self
        return replace(self, failures=before.failures, views=before.views)


class FirstAction(Enum):
    """The first action of a try."""

    SUBMIT = "submit"
    REATTACH = "reattach"
    RETURN = "return"


def first_action(handle: Handle | None, fingerprint: str, max_tries: int, status: Status | None) -> FirstAction:
    """Decide on the first action of a try.

    :param handle: the handle that an earlier try has stored.
    :param status: the status of its job; ``None`` if the state does not know it.
    """
    from airflow_cdc_provider.engine.state.submission import Status

    if handle is None or not handle.belongs_to(fingerprint, max_tries):
        return FirstAction.SUBMIT
    steps: dict[Status | None, FirstAction] = {Status.RUNNING: FirstAction.REATTACH, Status.DONE: FirstAction.RETURN}
    return steps.get(status, FirstAction.SUBMIT)
