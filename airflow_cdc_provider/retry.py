"""Converts the retry directive of the engine's errors to Airflow's terms.

An error becomes an ``AirflowFailException`` if a retry cannot resolve it, or if a person must look at it first. It ends
the task, whatever its ``retries`` and its retry policy are. All other errors are left to ``retries``;
:data:`CDC_RETRY_POLICY` provides the reason that Airflow shows. The operators have the policy by default. Tasks that
call the engine directly can use it, too: it understands errors of the engine that are not wrapped for Airflow.
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
    """The common base of both kinds of failure.

    :param message: a description of what happened.
    :param solution: the action that the user should take.
    :param directive: the retry directive of the engine's error.
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
        """Pickle by the parameters, because they differ from those of ``Exception``."""
        return type(self), (self.message, self.solution, self.directive, self.kind)


class CdcTaskFailed(_OfTheEngine):
    """A failure of a task that may be temporary; ``retries`` decides."""


class CdcTaskRefused(_OfTheEngine, AirflowFailException):
    """A failure of a task that a retry cannot resolve, or that a person must look at first."""


class CdcRetryPolicy(RetryPolicy):
    """A policy that follows the retry directive of the engine's error; Airflow's own logic handles other exceptions."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Decide based on the first error of the engine among the exception and its causes."""
        found = next((e for e in _causes(exception) if isinstance(e, CdcError | _OfTheEngine)), None)
        if found is None:
            return RetryDecision.default()
        directive = found.retry if isinstance(found, CdcError) else found.directive
        if directive is Retry.RETRY:
            return RetryDecision.retry(reason=f"{found.kind}: {found.message}")
        why = "a person must look at it first" if directive is Retry.ASK else "a retry cannot help"
        return RetryDecision.fail(reason=f"{found.kind}, {why}: {found.message}. {found.solution}")

    def serialize(self) -> dict[str, Any]:
        """Return only the type, because the policy has no settings."""
        return {"__type": type(self).__name__}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> CdcRetryPolicy:
        """Return the policy, which has no settings."""
        return cls()


CDC_RETRY_POLICY = CdcRetryPolicy()
"""A value for ``retry_policy`` of any task that calls the engine."""


def _causes(exception: BaseException | None) -> Iterator[BaseException]:
    while exception is not None:
        yield exception
        exception = exception.__cause__
