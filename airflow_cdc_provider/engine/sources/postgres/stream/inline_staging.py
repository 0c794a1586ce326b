"""How staging gets into the tasks that read the log, so that one task reads a piece and stages it.

Staged behind the read (``mapInArrow``), a piece passes through the JVM and between two Python processes, and a batch
needs two of these for each core. In the read itself (:meth:`.spark_source.SlotStreamReader.read`) it needs to know what
is to be done, which the driver knows, but Spark asks the reader for the tasks of a batch before it tells the driver of
it (``foreachBatch``). So the reader asks the driver beforehand, and ships the answer with the pieces.

Until the batch is staged, that may have changed: a request has tables read again, or the batch is cut where the schema
changes. The driver says by a local property of its thread, which Spark hands to tasks, which of the answers it goes
by. A task that has no such answer returns the raw piece, and that is staged behind the read.

Tasks on the driver's machine also tell it at once that a piece is staged; Spark tells of all of them at the end.

The work holds addresses with passwords, and keys, which are data. Local properties show up in event logs, and files
outlive a driver that is killed; so it goes through a socket.
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
from airflow_cdc_provider.engine.sources.postgres.stream.staging_task import Stage
from airflow_cdc_provider.engine.spark.local_sockets import Answering, ask

_PROPERTY = "airflow_cdc.stage"
_OFFERS = "offers"
_TOLD = "told"
_IDLE = "idle"
# It is shipped with each task of a batch, some of which would not fit into a message to an executor with more.
_LARGEST = 256 << 10


class Handout:
    """The driver's side: hands out the staging of the batch that comes next, and stages it.

    :ivar offers: what says how each sink would stage it; called between two batches, on a thread of its own.
    """

    def __init__(self) -> None:
        self.offers: list[Callable[[], Stage]] = []
        self._handed: dict[str, Stage] = {}
        self._numbers = count()
        self._listeners: dict[str, Callable[[object], None]] = {}

    @contextmanager
    def serving(self, directory: str, idle: Callable[[Lsn], None]) -> Iterator[None]:
        """Answer the reader for the time of a query.

        :param directory: a :func:`.meeting_place`.
        :param idle: called, in a thread, when the reader has nothing to apply, with the LSN up to which it has read.
        """

        def hear(lsn: bytearray) -> list[bytes]:
            idle(Lsn(int(lsn)))
            return []

        with (
            closing(Answering(directory, _OFFERS, lambda _: self._hand_out())),
            closing(Answering(directory, _TOLD, self._pass_on)),
            closing(Answering(directory, _IDLE, hear)),
        ):
            yield

    def _hand_out(self) -> list[bytes]:
        self._handed = {str(next(self._numbers)): offer() for offer in self.offers}
        pickled = {
            number: zlib.compress(cloudpickle.dumps(stage), 1)  # type: ignore[no-untyped-call]
            for number, stage in self._handed.items()
        }
        if sum(map(len, pickled.values())) > _LARGEST:
            self._handed, pickled = {}, {}
        return [pickle.dumps(pickled)]

    def _pass_on(self, told: bytearray) -> list[bytes]:
        number, message = pickle.loads(told)
        listener = self._listeners.get(number)
        if listener is not None:
            listener(pickle.loads(message))
        return []

    def stage(self, pieces: DataFrame, stage: Stage, hear: Callable[[object], None] | None = None) -> list[Any]:
        """Stage a batch.

        :param pieces: rows of :class:`.spark_source.PostgresCdcSource`.
        :param hear: is called with messages while others are still to come, in any thread; perhaps with none.
        :returns: the messages of :class:`.Stage`, one a piece, in no order.
        """
        rows: list[Row] = []
        # Tables that compare as equal may differ in what a schema change has brought.
        numbers = (n for n, handed in self._handed.items() if handed.targets is stage.targets and handed == stage)
        number = next(numbers, None)
        if number is not None:
            context = pieces.sparkSession.sparkContext
            context.setLocalProperty(_PROPERTY, number)
            if hear is not None:
                self._listeners[number] = hear
            try:
                rows = pieces.select("message").collect()
            finally:
                self._listeners.pop(number, None)
                context.setLocalProperty(_PROPERTY, None)  # type: ignore[arg-type]  # removes it
        # Where threads of Python have none of Java's own, tasks may not be told.
        if number is None or any(row.message is None for row in rows):
            rows = pieces.mapInArrow(stage, "message binary").collect()
        return [pickle.loads(row.message) for row in rows]


def handed_out(directory: str) -> Mapping[str, bytes]:
    """The reader's side: what the driver hands out for the next batch, to be shipped with its pieces."""
    handed: Mapping[str, bytes] = pickle.loads(ask(directory, _OFFERS))
    return handed


def tell_idle(directory: str, passed: Lsn) -> None:
    """The reader's side: let the driver know that there is nothing to apply.

    :param passed: LSN up to which the log has been read.
    """
    with suppress(OSError):  # the driver asks no more
        ask(directory, _IDLE, str(passed).encode())


def chosen(handed: Mapping[str, bytes]) -> Stage | None:
    """The task's side: what the driver goes by, of what was handed out; ``None`` when that is something else."""
    number = _number()
    if number is None or number not in handed:
        return None
    stage: Stage = pickle.loads(zlib.decompress(handed[number]))
    return stage


def tell(directory: str, message: bytes) -> None:
    """The task's side: let a driver on this machine know at once what it will read from Spark when all are done.

    :param message: pickled.
    """
    with suppress(OSError):  # it has been ended, or asks no more
        ask(directory, _TOLD, pickle.dumps((_number(), message)))


def _number() -> str | None:
    context = TaskContext.get()
    return context.getLocalProperty(_PROPERTY) if context is not None else None
