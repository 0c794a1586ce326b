"""What checks find: one sentence each, with a remedy when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, TypeVar

from airflow_cdc_provider.engine.core.errors import CdcError, Retry

T = TypeVar("T")

# What people copy out of a line, a name or an option, stays whole.
_WRAPPED: dict[str, Any] = {"width": 110, "break_long_words": False, "break_on_hyphens": False}
_HANGING = {**_WRAPPED, "subsequent_indent": "  "}
_INDENTED = {**_WRAPPED, "initial_indent": "    ", "subsequent_indent": "    "}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    :param check: the check's short name.
    :param message: one sentence.
    :param error: why the pipeline cannot run; ``None`` when the check passed or merely warns.
    """

    check: str
    ok: bool
    message: str
    error: CdcError | None = None
    warning: bool = False

    @property
    def mark(self) -> str:
        """The sign in front of the message where findings are listed."""
        return "!" if self.warning else "✓" if self.ok else "✗"

    def lines(self) -> list[str]:
        """Return the finding as lines of bounded width: the marked message, and below it the remedy."""
        remedy = wrap(self.error.solution, **_INDENTED) if self.error is not None else []
        return [*wrap(f"{self.mark} {self.message}", **_HANGING), *remedy]


class Caution(Exception):
    """Raised by a check that has something to say but does not stand in the way."""


@dataclass
class Checks:
    """Runs checks and collects what they find.

    :param around: entered for each check by its name: turns what drivers raise into :class:`.CdcError`.
    """

    around: Callable[[str], AbstractContextManager[object]]
    findings: list[Finding] = field(default_factory=list)

    def run(self, check: str, function: Callable[[], T], describe: Callable[[T], str] = str) -> T | None:
        """Run one check; ``describe`` puts its result into a sentence. ``None`` when it failed."""
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
        """Tell what does not stand in the way; ``message`` is one sentence."""
        self.findings.append(Finding(check, True, message, warning=True))

    def passed(self, *checks: str) -> bool:
        """Whether none of some checks has failed, as far as they have been run."""
        return all(finding.ok for finding in self.findings if finding.check in checks)


def combined(findings: Sequence[Finding]) -> CdcError | None:
    """Return the errors of findings as one.

    It is of the class of the first that trying again cannot mend, if there is one. ``None`` without errors.
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

    :raises CdcError: of the class that fits the finding.
    """
    for finding in findings:
        if finding.error is not None:
            raise finding.error
