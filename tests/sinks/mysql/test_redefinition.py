"""Tables that are recreated next to the target, and replace it: obstacles, and the remains of crashes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    Failpoint,
    StagingLost,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.mysql import redefinition as mysql_redefinition
from airflow_cdc_provider.engine.sinks.mysql.sink import MysqlSink
from local_servers.mariadb import MariadbServer
from tests.sinks.begun_sink import (
    IDENTITY,
    LABEL,
    ORIGIN,
    TABLE,
    TARGET,
    WATERMARK,
    text,
    upsert,
)
from tests.sinks.mysql.prepared_sink import prepared, query, rows, stage
from tests.support.given_rows import GivenRows


def test_rows_that_are_read_aside_are_of_no_use_once_a_unit_has_passed(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit is applied to the table that they would replace, and is missing in them."""
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    wider = replace(TABLE, columns=(*TABLE.columns, Column("more", "date", 1082, None, False, True, attnum=4)))
    after = Target(wider, TARGET.schema, TARGET.name)
    batch = pa.RecordBatch.from_arrays(
        [text("5"), text("read"), text("7"), text("2000-01-01")], names=["id", "note", "amount", "more"]
    )
    unit = [stage(sink, epoch, [upsert("2", "b", "2")], index=1)]

    def pass_by(place: str) -> None:
        if place == "after-aside":
            assert sink.commit(epoch, 200, 300, unit)

    monkeypatch.setattr(mysql_redefinition, "failpoint", pass_by)
    with pytest.raises(StreamFailed, match="0/C8 to 0/12C"):
        sink.replace(epoch, after, None, GivenRows([batch], lambda: WATERMARK), TARGET)
    assert rows(mariadb) == [(1, "a", "1.00"), (2, "b", "2.00")]
    monkeypatch.undo()
    assert sink.replace(epoch, after, None, GivenRows([batch], lambda: WATERMARK), TARGET) == 1
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert sink.record().targets == (after,)  # type: ignore[union-attr]


WIDER = Target(
    replace(TABLE, columns=(*TABLE.columns, Column("more", "date", 1082, None, False, True, attnum=4))),
    TARGET.schema,
    TARGET.name,
)
"""The target under a definition for which it must be recreated."""


def read_anew(*keys: str) -> Iterator[pa.RecordBatch]:
    columns = [text(*keys), text(*["read"] * len(keys)), text(*["7"] * len(keys)), text(*["2000-01-01"] * len(keys))]
    yield pa.RecordBatch.from_arrays(columns, names=["id", "note", "amount", "more"])


def tables_aside(server: MariadbServer) -> int:
    found = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = 'airflow_cdc'"
    return int(str(query(server, rf"{found} AND table_name LIKE 'aside\_%'")[0][0]))


@pytest.mark.parametrize("before", [TARGET, None])
def test_a_table_filled_aside_that_is_gone_takes_no_place(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, before: Target | None
) -> None:
    """Its rows would be recorded as read, and be nowhere."""
    sink, epoch = prepared(mariadb)
    if before is None:
        sink.forget(epoch, [LABEL])
        query(mariadb, "DROP TABLE `copy`.`Ord ers`")
    else:
        sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])

    def sweep(place: str) -> None:
        if place == "after-aside":
            sink.sweep(epoch)

    recorded = sink.record()
    monkeypatch.setattr(mysql_redefinition, "failpoint", sweep)
    with pytest.raises(StagingLost, match=r"aside_.* no longer exists"):
        sink.replace(epoch, WIDER, None, GivenRows(read_anew("5"), lambda: WATERMARK), before)
    assert sink.record() == recorded
    monkeypatch.undo()
    sink.replace(epoch, WIDER, None, GivenRows(read_anew("5"), lambda: WATERMARK), before)
    assert rows(mariadb) == [(5, "read", "7.00")]


def test_a_trigger_made_while_a_table_is_read_aside_is_named(mariadb: MariadbServer) -> None:
    sink, epoch = prepared(mariadb)
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])

    def reading() -> Iterator[pa.RecordBatch]:
        query(mariadb, "CREATE TRIGGER `copy`.mine BEFORE INSERT ON `copy`.`Ord ers` FOR EACH ROW SET @x = 1")
        yield from read_anew("5")

    with pytest.raises(CannotFollow, match="would be lost: mine"):
        sink.replace(epoch, WIDER, None, GivenRows(reading(), lambda: WATERMARK), TARGET)
    assert rows(mariadb) == [(1, "a", "1.00")]
    assert query(mariadb, "SELECT * FROM airflow_cdc.pending") == []
    query(mariadb, "DROP TRIGGER `copy`.mine")
    sink.replace(epoch, WIDER, None, GivenRows(read_anew("5"), lambda: WATERMARK), TARGET)
    assert rows(mariadb) == [(5, "read", "7.00")]


def broken_off(sink: MysqlSink, epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce an exchange, and break off before it is done."""
    sink.commit(epoch, 100, 200, [stage(sink, epoch, [upsert("1", "a", "1")])])
    monkeypatch.setenv(VARIABLE, "before-exchange:error")
    with pytest.raises(Failpoint):
        sink.replace(epoch, WIDER, None, GivenRows(read_anew("5"), lambda: WATERMARK), TARGET)
    monkeypatch.delenv(VARIABLE)


def test_what_keeps_an_announced_exchange_from_being_done_is_named(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, epoch = prepared(mariadb)
    broken_off(sink, epoch, monkeypatch)
    query(mariadb, "CREATE TRIGGER `copy`.mine BEFORE INSERT ON `copy`.`Ord ers` FOR EACH ROW SET @x = 1")
    with pytest.raises(CannotFollow, match=r"copy\.Ord ers cannot be replaced .*[Tt]rigger") as refused:
        sink.take_epoch("next")
    assert "a trigger on copy.Ord ers" in refused.value.solution
    query(mariadb, "DROP TRIGGER `copy`.mine")
    sink.take_epoch("next")
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert tables_aside(mariadb) == 0


def test_a_foreign_key_from_elsewhere_to_a_table_made_anew_is_named(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the old table, which could then not be dropped."""
    sink, epoch = prepared(mariadb)
    broken_off(sink, epoch, monkeypatch)
    query(mariadb, "CREATE DATABASE child")
    query(mariadb, "CREATE TABLE child.k (n bigint, FOREIGN KEY (n) REFERENCES `copy`.`Ord ers` (id)) ENGINE=InnoDB")
    try:
        for _ in range(2):
            with pytest.raises(TargetConflict, match=r"airflow_cdc\.aside_\w+_old, which was copy\.Ord ers"):
                sink.take_epoch("next")
    finally:
        query(mariadb, "DROP TABLE child.k")  # it keeps the databases from being dropped
    sink.take_epoch("next")
    assert rows(mariadb) == [(5, "read", "7.00")]
    assert tables_aside(mariadb) == 0
    assert sink.record().targets == (WIDER,)  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["before-exchange", "after-exchange"])
def test_a_table_that_is_about_to_take_its_place_is_not_missing(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It is already recorded as read; after a crash, any command may be the first to check."""
    sink = MysqlSink(mariadb.dsn, "p", "mirror")
    sink.prepare([], [], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        sink.replace(epoch, WIDER, None, GivenRows(read_anew("5"), lambda: WATERMARK), None)
    monkeypatch.delenv(VARIABLE)
    if place == "before-exchange":
        query(mariadb, "DROP DATABASE `copy`")  # created for it, and still empty
    record = sink.record()
    assert record is not None
    assert record.targets == (WIDER,)
    assert sink.missing(record.targets) == ()
    assert rows(mariadb) == [(5, "read", "7.00")]


@pytest.mark.parametrize("place", ["after-alteration", "before-default-dropped"])
def test_an_alteration_that_breaks_off_leaves_no_default(
    mariadb: MariadbServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It gives existing rows the new column's value; events without values, and later rows, must not get it."""
    sink, epoch = prepared(mariadb, "changelog")
    batch = pa.RecordBatch.from_arrays([text("1"), text("a"), text("1")], names=["id", "note", "amount"])
    sink.write_chunk(epoch, TARGET, Chunk(LABEL, 0, None, None), ORIGIN, GivenRows([batch], lambda: WATERMARK))
    sink.replace(epoch, TARGET, None, GivenRows([batch], lambda: WATERMARK), TARGET)
    extra = Column("extra", "text", 25, None, False, True, attnum=4, missing="given")
    after = Target(replace(TABLE, columns=(*TABLE.columns, extra)), TARGET.schema, TARGET.name)
    monkeypatch.setenv(VARIABLE, f"{place}:error")
    with pytest.raises(Failpoint):
        sink.redefine(epoch, TARGET, after)
    monkeypatch.delenv(VARIABLE)
    epoch = sink.take_epoch("next")
    assert sink.record().targets == (after,)  # type: ignore[union-attr]
    sink.replace(epoch, after, frozenset({("1",)}), GivenRows([], lambda: WATERMARK), after)
    query(mariadb, "INSERT INTO `copy`.`Ord ers` (_op, _commit_lsn, _seq) VALUES ('r', 999, 1)")
    assert query(mariadb, "SELECT _op, id, extra FROM `copy`.`Ord ers` ORDER BY _commit_lsn, _seq") == [
        ("r", 1, "given"),
        ("t", None, None),
        ("r", 1, "given"),
        ("d", 1, None),
        ("r", None, None),
    ]
