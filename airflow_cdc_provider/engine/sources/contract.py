"""The contract of a source: what commands and runs ask of it, and what they may rely on.

Delivery: a source hands every change to the sinks at least once, in the order of its log, and begins again where the
commit records say. That nothing arrives twice is for the sinks, which know what they have.

Order: a unit of the stream ends where transactions or messages do, and is committed by all sinks before the source is
told that it may forget what the unit was made of.

Concurrency: one run at a time has the epoch, see :mod:`.runs.source`; commands that only look may be at work beside it.

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
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.progress import SnapshotProgress, StreamProgress
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.source import AttachedSource, attached

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Follow = Callable[["SparkSession", Run, Record, Callable[[StreamProgress], None]], StreamProgress]
"""Follows the source from where a record says, and tells how far it is about once a second."""
Reached = Callable[[StreamProgress], bool]
"""Tells whether a stream has come as far as it was asked to."""
TellTable = Callable[[str, int, int], None]
"""Called with a table's label, and how much of how much of it has been compared."""


@dataclass(frozen=True)
class CheckedSource:
    """What the checks of a source have found.

    :param tables: that would be captured; ``None`` when they are not known, or not without Spark.
    :param identity: what is read; ``None`` when it cannot be told.
    :param require_continuation: see :meth:`Source.require_continuation`; ``None`` when the source cannot be asked.
    """

    tables: Sequence[Table] | None = None
    identity: SourceIdentity | None = None
    require_continuation: Callable[[Sequence[Record]], str] | None = None


@dataclass(frozen=True)
class SourceStatus:
    """What a source says of itself for ``status``.

    :param lag_bytes: bytes of the log that the sinks have not applied; ``None`` where that is not counted in bytes.
    :param lag_seconds: how long ago the sinks had all that the source had; ``None`` as above.
    :param slot: the replication slot; ``None`` where there is none.
    :param facts: what else is shown, as JSON values.
    :param trouble: why the source cannot continue what the sinks have; ``None`` if it can, or nobody asked.
    """

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    slot: dict[str, Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    trouble: CdcError | None = None


class Rereads(Protocol):
    """Reading tables of a source again."""

    def check(self, labels: Sequence[str], where: str | None) -> None:
        """Refuse, before anything is touched, what cannot be read again.

        :param labels: of tables.
        :param where: a condition on rows.
        """

    def request(self, labels: Sequence[str], where: str | None, name: str | None) -> str:
        """Leave a request for the live stream, and return its name."""

    def read(self, run: Run, labels: Sequence[str], where: str | None) -> dict[str, int]:
        """Read tables again in this process, one after the other; return how many rows of each were written."""

    def start_over(self, takeover: bool) -> int:
        """Make what is at the source anew, and plan all tables to be read again; return the epoch for that.

        :raises GateClosed: when neither record nor state tell what the pipeline has made.
        """


class Source(AttachedSource, Protocol):
    """The source of one pipeline. Nothing is connected before a method is called."""

    # -- before anything is touched -----------------------------------------------------------------

    def checking(self, checks: Checks) -> AbstractContextManager[CheckedSource]:
        """Check the source without Spark, changing nothing; what was found stays usable as long as the block."""

    @property
    def checks_with_spark(self) -> bool:
        """Whether :meth:`check_with_spark` finds anything."""

    def check_with_spark(self, spark: SparkSession) -> list[Finding]:
        """Check what Spark alone can tell, changing nothing."""

    def require_spark(self, spark: SparkSession) -> None:
        """Check what a stream needs of Spark, before another one is ended for it.

        :raises SparkUnusable: when Spark lacks it.
        """

    def require_continuation(self, records: Sequence[Record]) -> str:
        """Check that the source can continue what the sinks have.

        :param records: the commit records of the sinks that have one.
        :returns: a sentence.
        :raises GateClosed: naming what differs and the repair.
        :raises ConfigError: when a record was made with a source of another kind, or the pipeline file leaves out what
            has been read.
        """

    # -- commands -----------------------------------------------------------------------------------

    def joining(self) -> list[str]:
        """Return the labels of tables that the file has gained, and a live stream could take in."""

    def provision(self, takeover: bool) -> tuple[Record, Mapping[str, Any]]:
        """Make, or verify, what the pipeline needs at the source, target tables and records; take the epoch of a run.

        Called after all checks have passed. The ``identity`` of a record that begins is that of
        :func:`.commit_records.identity_of`; what is noted later leaves its ``source`` and ``mode`` as they are.

        :returns: the commit record, and facts about the source to be shown.
        :raises CdcError: when something stands in the way; then nothing has been changed, but for sinks that have begun
            before one that refuses.
        """

    def facts(self, record: Record) -> Mapping[str, Any]:
        """Return the facts about the source that :meth:`provision` does, changing nothing."""

    def copy_chunks(
        self,
        spark: SparkSession,
        run: Run,
        record: Record,
        chunks: Sequence[Chunk],
        tell: Callable[[SnapshotProgress], None],
    ) -> None:
        """Copy chunks that :meth:`provision` has planned, in parallel, each committed with its watermark."""

    def follower(self, record: Record, ending: Ending) -> tuple[Follow, Reached]:
        """Return what follows the source until an end, and what tells whether it has been reached."""

    def is_finished(self, record: Record) -> bool:
        """Return whether a pipeline that was to copy only has done so, and has nothing left at the source."""

    def release(self, record: Record) -> None:
        """Remove what follows changes at the source, once a pipeline that was to copy only has done so."""

    def status(self, record: Record | None, records: Sequence[Record], judge: bool) -> SourceStatus:
        """Look where the source is.

        :param record: of all sinks as one; ``None`` unless all have one.
        :param records: of those sinks that have one.
        :param judge: whether to look if the source can continue them.
        :raises ConnectionFailed: when it cannot be reached.
        """

    def verify(self, live: bool, tell: TellTable) -> dict[str, Any]:
        """Compare source and sinks, as JSON values: ``equal``, ``tables``, ``live``, ``lag_bytes``, ``not_compared``.

        :param live: whether a stream is at work meanwhile.
        """

    def rereads(self, command: str) -> Rereads:
        """Return what reads tables again.

        :raises ConfigError: when the source cannot; naming the command.
        """

    def skip(self, topic: str, partition: int, offsets: Iterable[tuple[int, int]], takeover: bool) -> Mapping[str, Any]:
        """Note messages that are passed over from here on in the sinks' records.

        :returns: as JSON values, ``epoch`` and all that are ``skipped`` by now.
        :raises ConfigError: when the source has no messages, or these cannot be passed over.
        """

    def remove(self, takeover: bool, source_gone: bool) -> list[str]:
        """Remove what the pipeline has made at the source, its records and its state; never target tables.

        :param source_gone: go on if the source cannot be reached.
        :returns: the statements that would remove what may be left there.
        :raises ConfigError: when another kind of source has filled a sink; then nothing has been removed.
        """


def source_of(pipeline: Pipeline) -> Source:
    """Return the source of a pipeline.

    :raises ConfigError: when its kind cannot be loaded.
    """
    return cast(Source, attached(pipeline))


def trouble_of(require: Callable[[], object]) -> CdcError | None:
    """Return what a check refuses, if that is not an outage; ``None`` when it passes."""
    try:
        require()
    except (Refused, ConfigError) as e:
        return e
    return None
