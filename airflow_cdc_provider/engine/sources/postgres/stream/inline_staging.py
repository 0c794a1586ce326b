"""Inline staging: a piece of the log is staged by the task that reads it.

The alternative is a second task behind the read (``mapInArrow``). Then each piece passes through the JVM and between
two Python processes, and a batch needs two of these for each core. In the read itself
(:meth:`.spark_source.SlotStreamReader.read`) a task must know how to stage, which only the driver knows; but Spark asks
the reader for the tasks of a batch before it calls the driver (``foreachBatch``). So the reader asks the driver
beforehand and ships the answers, the *offers*, with the pieces. This module has all three ends::

     reader, next to the driver       driver                            task
     --------------------------       ------                            ----
     offered_stages()  -------------> InlineStaging: a StagingTask
                       <-- offers ---   for each sink, numbered
     plans the tasks: pieces, offers
              |                       InlineStaging.stage(): which
              |                         offer is still right?
              |                         number (local property) ------> agreed_stage()
              +----------- piece and offers (with the task) ----------> StagingTask.message()
                                      listener <-------- message ------ report_staged(), at once
                                      collect() <------- messages ----- result of the task, at the end

Until a batch is staged, the right way may have changed: a request has tables read again, or the batch is cut where the
schema changes. The driver names the offer that is right in a local property of its thread, which Spark hands to tasks.
A task without such an offer returns the raw piece, which a second task then stages as described above.

Only tasks on the driver's machine can report at once that a piece is staged, for :mod:`.pipelined_commit`.

The offers hold addresses with passwords, and keys, which are data. Local properties show up in event logs, and files
outlive a driver that is killed, so the offers go through a socket.

Gain: without a sink the stream went from 0.77 to 1.29 of ``pg_recvlogical``, into files from 0.80 to 1.31, with half of
the JVM's CPU (``docs/performance.md``; benchmark cases ``stream-noop`` and ``stream-files``).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

from pyspark import TaskContext, cloudpickle
from pyspark.sql import DataFrame, Row

from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import StagingTask
from airflow_cdc_provider.engine.spark.local_sockets import Answering, ask

_PROPERTY = "airflow_cdc.stage"
_OFFERS = "offers"
_STAGED = "staged"
_IDLE = "idle"
# Offers are shipped with each task of a batch. Larger ones might not fit into a message to an executor.
_MAX_OFFER_BYTES = 256 << 10


class InlineStaging:
    """The driver's end: offers the staging of the next batch, and stages it.

    :ivar offers: functions that return how each sink would stage the next batch; they are called between two batches,
        in a thread of their own.
    """

    def __init__(self) -> None:
        self.offers: list[Callable[[], StagingTask]] = []
        self._offered: dict[str, StagingTask] = {}
        self._numbers = count()
        self._listeners: dict[str, Callable[[object], None]] = {}

    @contextmanager
    def serving(self, directory: str, idle: Callable[[Lsn], None]) -> Iterator[None]:
        """Answer the reader and the tasks while a query runs.

        :param directory: a :func:`.socket_directory`.
        :param idle: called in a thread when the reader has nothing to apply, with the LSN up to which it has read.
        """

        def on_idle(lsn: bytearray) -> list[bytes]:
            idle(Lsn(int(lsn)))
            return []

        with (
            closing(Answering(directory, _OFFERS, lambda _: self._offer())),
            closing(Answering(directory, _STAGED, self._on_staged)),
            closing(Answering(directory, _IDLE, on_idle)),
        ):
            yield

    def _offer(self) -> list[bytes]:
        self._offered = {str(next(self._numbers)): offer() for offer in self.offers}
        pickled = {
            number: zlib.compress(cloudpickle.dumps(task), 1)  # type: ignore[no-untyped-call]
            for number, task in self._offered.items()
        }
        if sum(map(len, pickled.values())) > _MAX_OFFER_BYTES:
            self._offered, pickled = {}, {}
        return [pickle.dumps(pickled)]

    def _on_staged(self, report: bytearray) -> list[bytes]:
        number, message = pickle.loads(report)
        listener = self._listeners.get(number)
        if listener is not None:
            listener(pickle.loads(message))
        return []

    def stage(
        self, pieces: DataFrame, task: StagingTask, listener: Callable[[object], None] | None = None
    ) -> list[Any]:
        """Stage a batch.

        :param pieces: rows of :class:`.spark_source.PostgresCdcSource`.
        :param listener: called in any thread with messages while others are still to come; perhaps with none.
        :returns: the messages of the task, one a piece, in no order.
        """
        rows: list[Row] = []
        # Targets are compared with `is`: tables that compare as equal may differ in what a schema change has brought.
        numbers = (n for n, each in self._offered.items() if each.targets is task.targets and each == task)
        number = next(numbers, None)
        if number is not None:
            context = pieces.sparkSession.sparkContext
            context.setLocalProperty(_PROPERTY, number)
            if listener is not None:
                self._listeners[number] = listener
            try:
                rows = pieces.select("message").collect()
            finally:
                self._listeners.pop(number, None)
                context.setLocalProperty(_PROPERTY, None)  # type: ignore[arg-type]  # removes it
        # Tasks do not get the number if Python's threads have no Java threads of their own.
        if number is None or any(row.message is None for row in rows):
            rows = pieces.mapInArrow(task, "message binary").collect()
        return [pickle.loads(row.message) for row in rows]


def offered_stages(directory: str) -> Mapping[str, bytes]:
    """Return what the driver offers for the next batch, to be shipped with its pieces; called by the reader."""
    offered: Mapping[str, bytes] = pickle.loads(ask(directory, _OFFERS))
    return offered


def report_idle(directory: str, passed: Lsn) -> None:
    """Report to the driver that there is nothing to apply; called by the reader.

    :param passed: LSN up to which the log has been read.
    """
    with suppress(OSError):  # the driver no longer answers
        ask(directory, _IDLE, str(passed).encode())


def agreed_stage(offered: Mapping[str, bytes]) -> StagingTask | None:
    """Return the offer that the driver has chosen for this batch, ``None`` if it is none of these; called by a task."""
    number = _agreed_number()
    if number is None or number not in offered:
        return None
    task: StagingTask = pickle.loads(zlib.decompress(offered[number]))
    return task


def report_staged(directory: str, message: bytes) -> None:
    """Report at once to a driver on this machine what Spark returns to it when all tasks are done; called by a task.

    :param message: pickled.
    """
    with suppress(OSError):  # the driver has ended, or no longer answers
        ask(directory, _STAGED, pickle.dumps((_agreed_number(), message)))


def _agreed_number() -> str | None:
    context = TaskContext.get()
    return context.getLocalProperty(_PROPERTY) if context is not None else None
