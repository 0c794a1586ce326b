"""The errors of the engine: one class tree, each error with a solution and a retry directive.

The message of an error states what happened, with the names and values involved; ``solution`` states what to do about
it. The class of an error decides on the exit code of the process and on whether a retry can help. Therefore the
command line, the restart strategy of the stream and the retries of Airflow agree without depending on each other.
"""

from __future__ import annotations

import os
from enum import Enum, IntEnum

_HIDDEN = "AIRFLOW_CDC_HIDE_VALUES"


def hide_values() -> None:
    """Keep values of rows out of the messages of this process and of the processes that it starts."""
    os.environ[_HIDDEN] = "1"


def values_hidden() -> bool:
    """Return whether messages must not show values of rows."""
    return _HIDDEN in os.environ


def hidden_on_executors() -> dict[str, str]:
    """Return the Spark configuration that makes executors hide values if this process does."""
    return {f"spark.executorEnv.{_HIDDEN}": "1"} if values_hidden() else {}


class ExitCode(IntEnum):
    """Exit codes of ``airflow-cdc``."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    REFUSED = 3
    DIFFERENT = 4


class Retry(Enum):
    """The action that a caller should take after an error."""

    RETRY = "retry"
    FAIL = "fail"
    ASK = "ask"


class CdcError(Exception):
    """The base class of all errors of the engine.

    :param message: a description of what happened, with names and values.
    :param solution: the action that the user should take.
    :param without_values: the message to use if values of rows are hidden; needed if ``message`` may quote values.
    :ivar noted: whether the error has been written into the pipeline's state.
    """

    exit_code = ExitCode.FAILED
    retry = Retry.FAIL
    noted = False
    quotes_rows = False
    """Whether messages of the class may quote rows.

    If values of rows are hidden, an error of such a class shows only a message that is known to quote none.
    """

    def __init__(self, message: str, solution: str, without_values: str | None = None) -> None:
        if without_values is None and self.quotes_rows:
            without_values = "the message may quote rows and is not shown (`messages.values` of the pipeline file)"
        self._without_values = without_values
        self.message = without_values if without_values is not None and values_hidden() else message
        super().__init__(self.message)
        self.solution = solution

    @property
    def kind(self) -> str:
        """Return the name of the error's class, as ``--json`` output has it."""
        return type(self).__name__

    def prefix_message(self, place: str) -> None:
        """Prefix the message with the thing that the error is about.

        :param place: for example a table or a sink.
        """
        self.message = f"{place}: {self.message}"
        self.args = (self.message,)

    def as_dict(self) -> dict[str, str]:
        """Return the ``error`` object of ``--json`` output."""
        return {"kind": self.kind, "message": self.message, "solution": self.solution}

    def __reduce__(self) -> tuple[type[CdcError], tuple[str, str, str | None]]:
        """Pickle by message and solution, so that executors can send errors to the driver."""
        return type(self), (self.message, self.solution, self.message if values_hidden() else self._without_values)


# Exit 2: the pipeline file or the options are invalid.


class ConfigError(CdcError):
    """The pipeline file or a command-line option is invalid; nothing was changed."""

    exit_code = ExitCode.INVALID


class UnknownTable(ConfigError):
    """A table that the pipeline file names does not exist, or a pattern matches no table."""


class UnknownColumn(ConfigError):
    """A view names a column that is not captured."""


class UncapturableTable(ConfigError):
    """A table exists, but its changes cannot be captured as requested (no key, unlogged, a view)."""


# Exit 1: the environment failed.


class ConnectionFailed(CdcError):
    """A server cannot be reached, or accepts no connection at the moment."""

    retry = Retry.RETRY


class LoginRefused(ConnectionFailed):
    """A server refuses the login: password, role or database are wrong or not allowed."""

    retry = Retry.FAIL


class UnsafeSession(CdcError):
    """A session with Postgres lacks settings that keep values from being altered in transit."""


class ServerNotReady(CdcError):
    """The source server is not set up for logical replication (wal_level, slots, senders, privileges)."""


class MissingPrivilege(CdcError):
    """The role lacks a privilege that the pipeline needs."""


class StateUnwritable(CdcError):
    """The state location cannot be written or read."""


class StateDamaged(StateUnwritable):
    """A file of the state has contents that the engine did not write."""


class Blocked(CdcError):
    """Other transactions did not end within the timeout; the message names them."""

    retry = Retry.RETRY


class OlderTransactions(Blocked):
    """A table cannot be re-read until transactions of the source have ended; the message names them."""


class TableLocked(Blocked):
    """A table cannot be described or read because other sessions lock it; the message names them."""


class StreamFailed(CdcError):
    """The replication stream or a Spark job failed; it is safe to continue from the last commit."""

    retry = Retry.RETRY


class SchemaChanged(CdcError):
    """A table's definition differs from the recorded one at the moment when the table is read."""

    retry = Retry.RETRY


class SparkUnusable(CdcError):
    """Spark cannot be started, or its executors lack libraries that the engine needs."""


class SparkLost(CdcError):
    """Spark's JVM ended during the work, because it ran out of memory or was killed; committed data remains."""

    retry = Retry.RETRY


class JobLost(CdcError):
    """A submitted Spark job has not reported for too long; committed data remains."""

    retry = Retry.RETRY


class ProtocolError(CdcError):
    """The server sent bytes that the pgoutput protocol does not allow."""


class Interrupted(CdcError):
    """A signal interrupted a command that had no unit to finish first; committed data remains."""

    retry = Retry.RETRY


class Failpoint(CdcError):
    """A failpoint set by ``AIRFLOW_CDC_FAILPOINT`` fired."""

    retry = Retry.RETRY


# Exit 3: refused to protect data.


class Refused(CdcError):
    """Continuing could lose or corrupt data, so nothing was done."""

    exit_code = ExitCode.REFUSED
    retry = Retry.ASK


class GateClosed(Refused):
    """The source is not the one that the sink's commit record was written from, or its slot cannot continue it."""


class SecondWriter(Refused):
    """Another run of the same pipeline is alive."""

    retry = Retry.RETRY


class ClockDiffers(SecondWriter):
    """A job on another host has left a heartbeat from the future, so it is unknown whether the job is alive."""


class Fenced(Refused):
    """The pipeline's epoch is no longer that of this run because another run has taken over.

    This run must not commit.
    """

    retry = Retry.FAIL

    @classmethod
    def by(cls, other: str, current: int, epoch: int) -> Fenced:
        """Return the error of a run that has found an epoch other than its own.

        :param other: the thing that has the epoch ``current``, and a verb.
        :param epoch: the epoch of the run.
        """
        message = f"this run has epoch {epoch}, but {other} epoch {current}: "
        if current > epoch:
            return cls(
                f"{message}another run has taken over",
                "If the other run is intended, do nothing; otherwise stop it and start this one again.",
            )
        return cls(
            f"{message}the commit record is older than this run; the sink may have been restored from a backup",
            "Start the pipeline again; it first checks whether the source can continue that commit record.",
        )


class SlotBudgetExceeded(Refused):
    """The slot retains more WAL of the source than the pipeline file allows."""


class ForeignTable(Refused):
    """A target table exists with rows that this pipeline did not write."""


class UntrustedServer(Refused):
    """A server offers no TLS, has a certificate that cannot be trusted, or asks for files of this machine."""


class SinkIsSource(Refused):
    """Source and sink are the same database."""


class TargetConflict(Refused):
    """A constraint, trigger, key or foreign change of a target table prevents a change of the source."""

    quotes_rows = True


class StagingLost(Refused):
    """The staged rows of a unit are not those that were written; the unit was not committed."""

    retry = Retry.RETRY


class CannotFollow(Refused):
    """The stream has a schema change that cannot be applied to the sink."""


class ViewRefused(Refused):
    """The rows of a view cannot be computed or written; nothing of the unit was applied."""

    quotes_rows = True

    @classmethod
    def by(cls, view: str, said: str, solution: str | None = None) -> ViewRefused:
        """Return the error for a view.

        :param said: the message of the store.
        :param solution: the solution; ``None`` if the SELECT has to be changed.
        """
        what = f"view {view} cannot be brought up to date"
        return cls(
            f"{what}: {' '.join(said.split())}",
            solution
            or f"Change the `sql` of {view} in the pipeline file so that it can be computed for all rows, or remove the"
            " view from the file; then start again.",
            what,
        )


class LimitExceeded(Refused):
    """A row, or a change of a row, exceeds what a Postgres server can send or accept: a message of 1 GB."""

    quotes_rows = True

    remedy = (
        "No part of the change was applied, and a retry does not help. Shorten the row, or exclude its large column"
        " with `columns` in the pipeline file. If the change is in the log already, run"
        " `airflow-cdc resnapshot --all`, which skips it: the command recreates the slot and reads the tables again."
    )
    """The solution of all errors of this class."""

    @classmethod
    def by(cls, said: str) -> LimitExceeded:
        """Return the error for a message of a server.

        :param said: the place where it happened, and the server's message.
        """
        beyond = "a row, or a change of a row, exceeds the limits of Postgres"
        return cls(f"{beyond}: {' '.join(said.split())}", cls.remedy, beyond)


class ValueRefused(Refused):
    """A target column cannot store a value of the source: an enum label, or a narrower or different type."""

    quotes_rows = True


class BadRecord(Refused):
    """A message of a topic does not match the pipeline file, and the file lets bad messages stop the pipeline."""

    quotes_rows = True
