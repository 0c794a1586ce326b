"""The calls that a pipeline makes on its sink, to be tried while the sink is refused something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from airflow_cdc_provider.engine.core.table import Column
from tests.sinks.begun_sink import IDENTITY, LABEL, NEW, OTHER, TABLE, TARGET, WHOLE, Begun

COLUMN = Column("more", "text", 25, None, False, True, attnum=4)
WIDER = replace(TARGET, table=replace(TABLE, columns=(*TABLE.columns, COLUMN)))


def attempts(begun: Begun) -> dict[str, Callable[[], object]]:
    """Return the writing calls that a pipeline makes on its sink."""
    sink, epoch = begun.sink, begun.epoch
    another = begun.store.sink(sink.mode, "q")
    piece = begun.piece(begun.put("6", "f", "6.00"))
    return {
        "prepare": lambda: another.prepare([OTHER], [], IDENTITY, 100),
        "take_epoch": lambda: sink.take_epoch("refused"),
        "add": lambda: sink.add(epoch, [OTHER], []),
        "write_chunk": lambda: begun.copy(WHOLE, NEW),
        "deposit": lambda: sink.deposit(epoch, "deposit", b"data"),
        "stage": lambda: begun.piece(begun.put("7", "g", "7.00")),
        "commit": lambda: sink.commit(epoch, 100, 200, [piece]),
        "replace": lambda: begun.reread(None, NEW),
        "redefine": lambda: sink.redefine(epoch, TARGET, WIDER),
        "record_source": lambda: sink.record_source(epoch, {"timeline": 2}),
        "restart": lambda: sink.restart(epoch, [TARGET], IDENTITY, 500),
        "forget": lambda: sink.forget(epoch, [LABEL]),
        "sweep": lambda: sink.sweep(epoch),
        "drop": sink.drop,
    }


def steps(begun: Begun) -> dict[str, Callable[[], object]]:
    """Return the writing and reading calls that a pipeline makes on a sink without a database."""
    begun.sink.deposit(begun.epoch, "there", b"data")
    return {
        **attempts(begun),
        "record": begun.sink.record,
        "missing": lambda: begun.sink.missing([TARGET]),
        "fetch": lambda: begun.sink.fetch(begun.epoch, "there", 4),
    }
