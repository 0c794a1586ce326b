"""Any error of a MySQL server, with any number and SQLSTATE and at any step, is reported with a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.core.record import Mode
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import LABEL, NEW, TABLE, TARGET, WHOLE, Begun, begin
from tests.support.mysql_store import MysqlStore

pytestmark = pytest.mark.slow

# Numbers with a special meaning, unknown numbers, and states of classes that drivers do not know.
STATES = (("45000", 1644), ("22007", 1292), ("40001", 1213), ("42000", 1142), ("HY000", 20_001), ("ZZ123", 30_000))
UNKNOWN = (20_001, 30_000)
TABLES = ("copy.`Ord ers`", *(f"airflow_cdc.{name}" for name in ("pipelines", "tables", "chunks")))


def refuse_with(store: MysqlStore, state: str, number: int) -> None:
    """Let every change of the target and of the record fail."""
    signal = f"SIGNAL SQLSTATE '{state}' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'no'"
    for (n, table), event in itertools.product(enumerate(TABLES), ("INSERT", "UPDATE", "DELETE")):
        schema = table.partition(".")[0]
        store.query(
            f"CREATE OR REPLACE TRIGGER {schema}.refuse_{n}_{event} BEFORE {event} ON {table} FOR EACH ROW {signal}"
        )


def attempts(begun: Begun) -> dict[str, Callable[[], object]]:
    """Return the calls that a pipeline makes on its sink."""
    sink, epoch = begun.sink, begun.epoch
    piece = begun.piece(begun.put("6", "f", "6.00"))
    return {
        "take_epoch": lambda: sink.take_epoch("refused"),
        "write_chunk": lambda: begun.copy(WHOLE, NEW),
        "commit": lambda: sink.commit(epoch, 100, 200, [piece]),
        "replace": lambda: begun.reread(None, NEW),
        "record_source": lambda: sink.record_source(epoch, {"timeline": 2}),
        "restart": lambda: sink.restart(epoch, [replace(TARGET, table=TABLE)], begun.record.identity, 500),
        "forget": lambda: sink.forget(epoch, [LABEL]),
        "drop": sink.drop,
    }


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_no_error_of_the_driver_leaves_the_sink(mariadb: MariadbServer, mode: Mode) -> None:
    store = MysqlStore(mariadb)
    begun = begin(store, mode)
    trials = attempts(begun)
    record = begun.record
    for state, number in STATES:
        refuse_with(store, state, number)
        for step, attempt in trials.items():
            with pytest.raises(CdcError) as refused:
                attempt()
            assert refused.value.solution, (number, step)
            assert "no" in refused.value.message, (number, step, refused.value)
            if number in UNKNOWN:
                assert str(number) in refused.value.message, (number, step)
    assert begun.record == record
    assert begun.rows() == []
