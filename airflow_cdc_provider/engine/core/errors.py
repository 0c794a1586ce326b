"""The errors of the engine: one tree, each with a solution and a retry directive.

An error says what happened, with the names and values involved; ``solution``
says what to do about it. Its class decides what the process exits with and
whether trying again can help, so that the command line, the restart strategy of
the stream and the retries of Airflow agree without knowing each other.
"""

from __future__ import annotations

import os
from enum import Enum, IntEnum

_HIDDEN = "AIRFLOW_CDC_HIDE_VALUES"


def hide_values() -> None:
    """Keep values of rows out of the messages of this process, and of those that it starts."""
    os.environ[_HIDDEN] = "1"


def values_hidden() -> bool:
    """Return whether messages must not show values of rows."""
    return _HIDDEN in os.environ


def hidden_on_executors() -> dict[str, str]:
    """Return Spark configuration by which executors hide values if this process does."""
    return {f"spark.executorEnv.{_HIDDEN}": "1"} if values_hidden() else {}


class ExitCode(IntEnum):
    """Exit codes of ``airflow-cdc``."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    REFUSED = 3
    DIFFERENT = 4


class Retry(Enum):
    """What a caller should do after an error."""

    RETRY = "retry"
    FAIL = "fail"
    ASK = "ask"


class CdcError(Exception):
    """Root of all errors of the engine: something failed.

    :param message: what happened, with names and values.
    :param solution: what the user should do.
    :param without_values: the message where values of rows are hidden, if the other may quote some.
    :ivar noted: whether it has been left in the pipeline's state.
    """

    exit_code = ExitCode.FAILED
    retry = Retry.FAIL
    noted = False
    quotes_rows = False
    """Whether messages of the class may quote rows: where these are hidden, only one that is known not to is shown."""

    def __init__(self, message: str, solution: str, without_values: str | None = None) -> None:
        if without_values is None and self.quotes_rows:
            without_values = "the message may quote rows and is not shown (`messages.values` of the pipeline file)"
        self._without_values = without_values
        self.message = without_values if without_values is not None and values_hidden() else message
        super().__init__(self.message)
        self.solution = solution

    @property
    def kind(self) -> str:
        """The name of the error's class, as it stands in ``--json`` output."""
        return type(self).__name__

    def tell_place(self, place: str) -> None:
        """Put before the message of what it tells."""
        self.message = f"{place}: {self.message}"
        self.args = (self.message,)

    def as_dict(self) -> dict[str, str]:
        """The ``error`` object of ``--json`` output."""
        return {"kind": self.kind, "message": self.message, "solution": self.solution}

    def __reduce__(self) -> tuple[type[CdcError], tuple[str, str, str | None]]:
        """Pickle by message and solution, so that errors cross from executors to the driver."""
        return type(self), (self.message, self.solution, self.message if values_hidden() else self._without_values)


# Exit 2: the pipeline file or the options are wrong.


class ConfigError(CdcError):
    """The pipeline file or a command-line option is wrong; nothing was touched."""

    exit_code = ExitCode.INVALID


class UnknownTable(ConfigError):
    """A table named in the pipeline file does not exist or matches nothing."""


class UncapturableTable(ConfigError):
    """A table exists, but changes to it cannot be captured as asked (no key, unlogged, a view)."""


# Exit 1: the environment failed.


class ConnectionFailed(CdcError):
    """A server cannot be reached, or takes no connection at the moment."""

    retry = Retry.RETRY


class LoginRefused(ConnectionFailed):
    """A server answers, and refuses the login: password, role or database are wrong, or are not admitted."""

    retry = Retry.FAIL


class UnsafeSession(CdcError):
    """A session with Postgres lacks settings without which values would be altered on their way."""


class ServerNotReady(CdcError):
    """The source server is not set up for logical replication (wal_level, slots, senders, privileges)."""


class MissingPrivilege(CdcError):
    """The role may not do what the pipeline needs."""


class StateUnwritable(CdcError):
    """The state location cannot be written or read."""


class StateDamaged(StateUnwritable):
    """A file in the state does not hold what the engine writes there."""


class Blocked(CdcError):
    """Waiting for other transactions took longer than the timeout; the blockers are named."""

    retry = Retry.RETRY


class OlderTransactions(Blocked):
    """A table cannot be read again before transactions of the source have ended; they are named."""


class TableLocked(Blocked):
    """A table is locked by others, who are named, so that it can be neither described nor read."""


class StreamFailed(CdcError):
    """The replication stream or a Spark job broke; going on from the last commit is safe."""

    retry = Retry.RETRY


class SchemaChanged(CdcError):
    """A table's definition is not the recorded one at the moment at which the table is read."""

    retry = Retry.RETRY


class SparkUnusable(CdcError):
    """Spark cannot be started, or its executors lack what the engine needs."""


class SparkLost(CdcError):
    """Spark's JVM ended in the middle of the work, for want of memory or killed; what was committed stays."""

    retry = Retry.RETRY


class JobLost(CdcError):
    """A submitted Spark job has not been heard of for too long; what was committed stays."""

    retry = Retry.RETRY


class ProtocolError(CdcError):
    """The server sent bytes that the pgoutput protocol does not allow."""


class Interrupted(CdcError):
    """A signal has broken off a command that had no unit to end first; what was committed stays."""

    retry = Retry.RETRY


class Failpoint(CdcError):
    """A failpoint set by ``AIRFLOW_CDC_FAILPOINT`` fired."""

    retry = Retry.RETRY


# Exit 3: refused to protect data.


class Refused(CdcError):
    """Going on could lose or corrupt data, so nothing was done."""

    exit_code = ExitCode.REFUSED
    retry = Retry.ASK


class GateClosed(Refused):
    """The source is not what the sink's commit record was written from, or its slot cannot continue it."""


class SecondWriter(Refused):
    """Another run of the same pipeline is alive."""

    retry = Retry.RETRY


class ClockDiffers(SecondWriter):
    """A job of another host has left a heartbeat of the future, so that it cannot be told whether it is alive."""


class Fenced(Refused):
    """The pipeline's epoch is not the run's any more, as another has taken over; this one must not commit."""

    retry = Retry.FAIL

    @classmethod
    def by(cls, other: str, current: int, epoch: int) -> Fenced:
        """What a run is told that has met another epoch than its own.

        :param other: what has the epoch ``current``, and a verb.
        :param epoch: the run's.
        """
        message = f"this run has epoch {epoch}, but {other} epoch {current}: "
        if current > epoch:
            return cls(
                f"{message}another run has taken over",
                "Nothing to do if the other run is meant; otherwise stop it and start again.",
            )
        return cls(
            f"{message}the record there is of before this run, as when the sink is restored from a backup",
            "Start again: whether the source can continue that record is looked at first.",
        )


class SlotBudgetExceeded(Refused):
    """The slot retains more of the source's log than the pipeline file allows."""


class ForeignTable(Refused):
    """A target table exists with rows that this pipeline did not write."""


class UntrustedServer(Refused):
    """A server offers no TLS, has a certificate that is not to be trusted, or asks for files of this machine."""


class SinkIsSource(Refused):
    """Source and sink are the same database."""


class TargetConflict(Refused):
    """A constraint, trigger, key or foreign change of a target table stands in the way of a change of the source."""

    quotes_rows = True


class StagingLost(Refused):
    """The staged rows of a unit are not those that were written; the unit was not committed."""

    retry = Retry.RETRY


class CannotFollow(Refused):
    """The stream carries a change of schema that cannot be applied to the sink."""


class LimitExceeded(Refused):
    """A row, or a change of one, exceeds what a Postgres server can send or take: a gigabyte in a message."""

    quotes_rows = True

    remedy = (
        "Nothing of it was applied, and trying again does not help. Shorten the row, or leave its large column out by"
        " `columns` in the pipeline file. If the change is in the log already, `airflow-cdc resnapshot --all` goes on"
        " without it: it makes the slot anew and reads the tables again."
    )
    """The solution, wherever it happens."""

    @classmethod
    def by(cls, said: str) -> LimitExceeded:
        """What is told of a server's error.

        :param said: where it happened, and the server's words.
        """
        beyond = "a row, or a change of one, is beyond the limits of Postgres"
        return cls(f"{beyond}: {' '.join(said.split())}", cls.remedy, beyond)


class ValueRefused(Refused):
    """A target column cannot hold a value that the source has: an enum label, a narrower or other type."""

    quotes_rows = True


class BadRecord(Refused):
    """A message of a topic is not what the pipeline file says of messages, and the file has bad ones stop it."""

    quotes_rows = True
