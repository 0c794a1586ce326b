"""What Airflow does after an error of the engine: the directive of the error's class, in Airflow's terms.

An error that trying again cannot mend, or after which a person has to look first, ends the task whatever its
``retries`` and its retry policy are: it is an ``AirflowFailException``. All others are left to ``retries``, with
:data:`CDC_RETRY_POLICY` for the reason that Airflow then shows. The operators have the policy by default; it also
serves tasks that call the engine themselves, whose errors come without Airflow's clothes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_cdc_provider.engine.core.errors import CdcError, Retry

if TYPE_CHECKING:
    from airflow.sdk import Context


class _OfTheEngine(AirflowException):
    """What the two kinds of failure share.

    :param message: what happened.
    :param solution: what the user should do.
    :param directive: what to do after the engine's error.
    :param kind: the name of the engine's error.
    """

    def __init__(self, message: str, solution: str, directive: Retry, kind: str) -> None:
        text = message if message.endswith((".", "!", "?")) else f"{message}."
        super().__init__(f"{text}\n{solution}" if solution else text)
        self.message = message
        self.solution = solution
        self.directive = directive
        self.kind = kind

    def __reduce__(self) -> tuple[type[_OfTheEngine], tuple[str, str, Retry, str]]:
        """Pickle by the parameters, which are not those of ``Exception``."""
        return type(self), (self.message, self.solution, self.directive, self.kind)


class CdcTaskFailed(_OfTheEngine):
    """A task failed of something that may pass; ``retries`` decides."""


class CdcTaskRefused(_OfTheEngine, AirflowFailException):
    """A task failed of something that trying again cannot mend, or that a person has to look at first."""


class CdcRetryPolicy(RetryPolicy):
    """Retries a task as the engine's error asks; other exceptions are left to Airflow's own logic."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Decide by the first error of the engine among the exception and its causes."""
        found = next((e for e in _causes(exception) if isinstance(e, CdcError | _OfTheEngine)), None)
        if found is None:
            return RetryDecision.default()
        directive = found.retry if isinstance(found, CdcError) else found.directive
        if directive is Retry.RETRY:
            return RetryDecision.retry(reason=f"{found.kind}: {found.message}")
        why = "a person has to look first" if directive is Retry.ASK else "trying again cannot help"
        return RetryDecision.fail(reason=f"{found.kind}, {why}: {found.message}. {found.solution}")

    def serialize(self) -> dict[str, Any]:
        """Nothing but its type: the policy has no settings."""
        return {"__type": type(self).__name__}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> CdcRetryPolicy:
        """The policy; it has no settings."""
        return cls()


CDC_RETRY_POLICY = CdcRetryPolicy()
"""For ``retry_policy`` of any task that calls the engine."""


def _causes(exception: BaseException | None) -> Iterator[BaseException]:
    while exception is not None:
        yield exception
        exception = exception.__cause__
