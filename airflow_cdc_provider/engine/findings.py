"""What checks find: one sentence each, with a remedy when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import psycopg2

from airflow_cdc_provider.engine.errors import CdcError, ConnectionFailed
from airflow_cdc_provider.engine.locks import naming_holders

T = TypeVar("T")


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


class Caution(Exception):
    """Raised by a check that has something to say but does not stand in the way."""


@dataclass
class Checks:
    """Runs checks and collects what they find."""

    findings: list[Finding] = field(default_factory=list)

    def run(self, check: str, function: Callable[[], T], describe: Callable[[T], str] = str) -> T | None:
        """Run one check; ``describe`` puts its result into a sentence. ``None`` when it failed."""
        try:
            with naming_holders():
                result = function()
        except Caution as e:
            self.findings.append(Finding(check, True, str(e), warning=True))
        except CdcError as e:
            self.findings.append(Finding(check, False, f"{e.message}.", e))
        except psycopg2.Error as e:
            broken = ConnectionFailed(f"the check {check} failed: {str(e).strip()}", "Look into the server's log.")
            self.findings.append(Finding(check, False, broken.message, broken))
        else:
            self.findings.append(Finding(check, True, describe(result)))
            return result
        return None

    def passed(self, *checks: str) -> bool:
        """Whether none of some checks has failed, as far as they have been run."""
        return all(finding.ok for finding in self.findings if finding.check in checks)


def require(findings: Sequence[Finding]) -> None:
    """Raise the error of the first finding that has one.

    :raises CdcError: of the class that fits the finding.
    """
    for finding in findings:
        if finding.error is not None:
            raise finding.error
