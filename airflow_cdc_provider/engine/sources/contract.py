"""The contract of a source: what commands and runs ask of it, and what they may rely on.

Delivery: a source hands every change to the sinks at least once, in the order of its log, and resumes at the position
given by the commit records. The sinks drop what they already have, so that nothing is applied twice.

Order: a unit of the stream ends at a boundary of transactions or messages. All sinks commit the unit before the source
gets permission to discard the data behind it.

Concurrency: one run at a time has the epoch, see :mod:`.runs.source`. Read-only commands may run at the same time.

A source of another package is registered by an entry point, see :mod:`.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, Refused
from airflow_cdc_provider.engine.core.findings import Checks, Finding
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.core.source_identity import SourceIdentity
from airflow_cdc_provider.engine.core.stream_end import Ending
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.core.workload import Workload
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress, StreamProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.source import AttachedSource, attached

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Follow = Callable[["SparkSession | None", Run, Record, Callable[[StreamProgress], None]], StreamProgress]
"""Follows the source from the position in a record, and reports its progress about once a second.

It is called without a session, to work in this process, only if :meth:`Source.workload` has returned an estimate.
"""
Reached = Callable[[StreamProgress], bool]
"""Returns whether a stream has reached the requested end."""
TellTable = Callable[[str, int, int], None]
"""Called with a table's label, the amount compared so far, and the total amount."""


ReadRecord = Callable[[], Record]
"""Reads the commit record of a sink that has one."""


@dataclass(frozen=True)
class CheckedSource:
    """The findings of the checks of a source.

    :param tables: the tables to capture; ``None`` if they are unknown, or known only to Spark.
    :param identity: what is read; ``None`` if it cannot be determined.
    :param require_continuation: see :meth:`Source.require_continuation`; ``None`` if the source cannot be asked.
    """

    tables: Sequence[Table] | None = None
    identity: SourceIdentity | None = None
    require_continuation: Callable[[Sequence[ReadRecord]], str] | None = None


@dataclass(frozen=True)
class SourceStatus:
    """The state of a source, for ``status``.

    :param lag_bytes: bytes of the log that the sinks have not applied; ``None`` if the lag is not counted in bytes.
    :param lag_seconds: seconds since the sinks had everything that the source had; ``None`` as above.
    :param slot: the replication slot; ``None`` if the source has none.
    :param facts: further facts to show, as JSON values.
    :param trouble: why the source cannot continue the sinks; ``None`` if it can, or if this was not checked.
    """

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    slot: dict[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    trouble: CdcError | None = None


class Rereads(Protocol):
    """Reads tables of a source again."""

    def check(self, labels: Sequence[str], where: str | None) -> None:
        """Refuse a re-read that is impossible, before anything is touched.

        :param labels: labels of the tables.
        :param where: a condition on rows.
        """

    def request(self, labels: Sequence[str], where: str | None, name: str | None) -> str:
        """Leave a request for the live stream, and return its name."""

    def read(self, run: Run, labels: Sequence[str], where: str | None) -> dict[str, int]:
        """Read tables again in this process, one after the other, and return the number of rows written for each."""

    def start_over(self, takeover: bool) -> int:
        """Recreate the pipeline's objects at the source, and plan to read all tables again; return the new epoch.

        :raises GateClosed: when neither the records nor the state say what the pipeline has created.
        """


class Source(AttachedSource, Protocol):
    """The source of one pipeline. It connects only when a method is called."""

    # -- before anything is touched -----------------------------------------------------------------

    def checking(self, checks: Checks) -> AbstractContextManager[CheckedSource]:
        """Check the source without Spark, changing nothing; the findings stay usable within the block."""

    @property
    def checks_with_spark(self) -> bool:
        """Return whether :meth:`check_with_spark` finds anything."""

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """Check what only Spark can determine, changing nothing."""

    def require_spark(self, spark: SparkSession) -> None:
        """Check what a stream needs from Spark, before the stream replaces another one.

        :raises SparkUnusable: when Spark lacks it.
        """

    def require_continuation(self, readers: Sequence[ReadRecord]) -> str:
        """Check that the source can continue what the sinks have.

        :param readers: for each sink that has a commit record, a function that reads it. A stream may be running, so
            what has been read of the source before may be older than the record.
        :returns: a sentence.
        :raises GateClosed: naming the difference and the repair.
        :raises ConfigError: when a record was created with a source of another kind, or the pipeline file leaves out
            something that has been read.
        """

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """Return the labels of tables that the file has gained and that a live stream could add."""

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """Create or verify what the pipeline needs at the source, the target tables and records; take the epoch of a
        run.

        Called after all checks have passed. The ``identity`` of a new record comes from
        :func:`.commit_records.identity_of`. Later notes do not change its ``source`` and ``mode``.

        :returns: the commit record, and facts about the source to show.
        :raises CdcError: when something prevents it. Nothing has been changed then, except in sinks that were prepared
            before the one that refused.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return the facts about the source that :meth:`provision` returns, changing nothing."""

    def workload(
        self, record: Record | None, chunks: Sequence[Chunk] = (), ending: Ending | None = None
    ) -> Workload | None:
        """Estimate the work of a part of a run, from the statistics of the source.

        :param record: the commit record; ``None`` before the first run, for a copy of all tables.
        :param chunks: the chunks to copy.
        :param ending: the end until which the log is to be followed; ``None`` if it is not.
        :returns: the estimate; ``None`` if the work has no known end, or can be done only with Spark.
        """

    def copy_chunks(
        self,
        spark: SparkSession | None,
        run: Run,
        record: Record,
        chunks: Sequence[Chunk],
        tell: Callable[[SnapshotProgress], None],
    ) -> None:
        """Copy chunks planned by :meth:`provision`; each is committed with its watermark.

        :param spark: copies them in parallel; without a session, this process copies one after the other.
        """

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """Return a function that follows the source until an end, and one that tells whether the end is reached."""

    def is_finished(self, record: Record) -> bool:
        """Return whether a copy-only pipeline has finished, and has nothing left at the source."""

    def release(self, record: Record) -> None:
        """Remove the objects at the source that capture changes, once a copy-only pipeline has finished."""

    def status(self, record: Record | None, readers: Sequence[ReadRecord], judge: bool) -> SourceStatus:
        """Return how far the source is, and whether it can continue.

        :param record: the merged record of all sinks; ``None`` unless all have one.
        :param readers: see :meth:`require_continuation`.
        :param judge: whether to check that the source can continue these records.
        :raises ConnectionFailed: when the source cannot be reached.
        """

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """Compare source and sinks, as JSON values: ``equal``, ``tables``, ``live``, ``lag_bytes``, ``not_compared``.

        :param live: whether a stream is running meanwhile.
        """

    def rereads(self, command: str) -> Rereads:
        """Return an object that reads tables again.

        :raises ConfigError: when the source cannot; naming the command.
        """

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Mapping[str, Any]:
        """Record in the sinks' records that messages are to be skipped from now on.

        :returns: as JSON values, ``epoch`` and all messages that are ``skipped`` by now.
        :raises ConfigError: when the source has no messages, or these messages cannot be skipped.
        """

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """Remove the pipeline's objects at the source, its records and its state; never target tables.

        :param source_gone: go on even if the source cannot be reached.
        :returns: statements that remove the objects that may be left at the source.
        :raises ConfigError: when a source of another kind has filled a sink; nothing has been removed then.
        """


def source_of(pipeline: Pipeline) -> Source:
    """Return the source of a pipeline.

    :raises ConfigError: when its kind cannot be loaded.
    """
    return cast(Source, attached(pipeline))


def blocking_error(require: Callable[[], object]) -> CdcError | None:
    """Return the error of a check unless it is an outage; ``None`` when the check passes."""
    try:
        require()
    except (Refused, ConfigError) as e:
        return e
    return None
