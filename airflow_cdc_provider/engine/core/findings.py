"""Findings of checks: one sentence each, with a remedy if the check failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, TypeVar

from airflow_cdc_provider.engine.core.errors import CdcError, Retry

T = TypeVar("T")

# Names and options are never broken, so that people can copy them.
_WRAPPED: dict[str, Any] = {"width": 110, "break_long_words": False, "break_on_hyphens": False}
_HANGING = {**_WRAPPED, "subsequent_indent": "  "}
_INDENTED = {**_WRAPPED, "initial_indent": "    ", "subsequent_indent": "    "}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    :param check: the check's short name.
    :param message: one sentence.
    :param error: the reason why the pipeline cannot run; ``None`` if the check passed or only warns.
    """

    check: str
    ok: bool
    message: str
    error: CdcError | None = None
    warning: bool = False

    @property
    def mark(self) -> str:
        """Return the sign in front of the message in a list of findings."""
        return "!" if self.warning else "✓" if self.ok else "✗"

    def lines(self) -> list[str]:
        """Return the finding as lines of limited width: the marked message, then the remedy."""
        remedy = wrap(self.error.solution, **_INDENTED) if self.error is not None else []
        return [*wrap(f"{self.mark} {self.message}", **_HANGING), *remedy]


class Caution(Exception):
    """A warning that a check raises if it does not keep the pipeline from running."""


@dataclass
class Checks:
    """A runner of checks that collects their findings.

    :param around: context manager entered with the name of each check; turns errors of drivers into
        :class:`.CdcError`.
    """

    around: Callable[[str], AbstractContextManager[object]]
    findings: list[Finding] = field(default_factory=list)

    def run(self, check: str, function: Callable[[], T], describe: Callable[[T], str] = str) -> T | None:
        """Run one check and return its result, or ``None`` if it failed.

        :param describe: turns the result into a sentence.
        """
        try:
            with self.around(check):
                result = function()
        except Caution as e:
            self.findings.append(Finding(check, True, str(e), warning=True))
        except CdcError as e:
            self.findings.append(Finding(check, False, f"{e.message}.", e))
        else:
            self.findings.append(Finding(check, True, describe(result)))
            return result
        return None

    def warn(self, check: str, message: str) -> None:
        """Add a warning.

        :param message: one sentence.
        """
        self.findings.append(Finding(check, True, message, warning=True))

    def passed(self, *checks: str) -> bool:
        """Return whether none of the named checks has failed; checks that have not run are ignored."""
        return all(finding.ok for finding in self.findings if finding.check in checks)


def combined(findings: Sequence[Finding]) -> CdcError | None:
    """Return the errors of findings as one error, or ``None`` if there are no errors.

    Its class is that of the first error that a retry cannot resolve, or else that of the first error.
    """
    failed = [(finding, finding.error) for finding in findings if finding.error is not None]
    if len(failed) <= 1:
        return failed[0][1] if failed else None
    first = next((error for _, error in failed if error.retry is not Retry.RETRY), failed[0][1])
    return type(first)(
        f"{len(failed)} of {len(findings)} checks failed",
        "\n".join(line for finding, _ in failed for line in finding.lines()),
    )


def require(findings: Sequence[Finding]) -> None:
    """Raise the error of the first finding that has one.

    :raises CdcError: the finding's own error.
    """
    for finding in findings:
        if finding.error is not None:
            raise finding.error
