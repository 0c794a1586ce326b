"""Reading rows again while the stream goes on: repair, and values that the log does not carry.

A re-read is a unit of its own between two units of the stream. Its snapshot must
see every transaction that the stream has already passed; from then on its rows
are filtered like those of a chunk, until the stream has passed its H. So a reader
of the sink never sees a row go back.

A table that is read again whole is taken as it is defined at that moment, whatever it was before. So this is also how
a table joins a running pipeline, and how a change of schema is followed that cannot be followed in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import psycopg2
import pyarrow as pa
from psycopg2 import sql

from airflow_cdc_provider.engine.changes.row_transform import transformed_rows
from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    GateClosed,
    OlderTransactions,
    SchemaChanged,
    TableLocked,
)
from airflow_cdc_provider.engine.core.record import Record, Target, Watermark, target_of
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import Connection, condition, connected, rows
from airflow_cdc_provider.engine.postgres.driver_errors import is_outage
from airflow_cdc_provider.engine.postgres.lock_holders import CONTROL_LOCK_SECONDS, naming_holders
from airflow_cdc_provider.engine.postgres.sql_condition import find_trouble
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.record_copy import write_ledger
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.single_writer import require_epoch
from airflow_cdc_provider.engine.runs.sink_checks import changelog_names, target_name
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import find
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import publish_anew
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import keys_condition
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers, require_visible
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read, plan_read, write_rows
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot, noted_published
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

T = TypeVar("T")
_DEFINITIONS = 5
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)


def check(pipeline: Pipeline, record: Record, label: str, where: str | None) -> None:
    """Refuse a re-read that cannot be done, before anything is touched.

    :raises ConfigError: when the table is unknown or has no key, or the condition is not valid on either side.
    :raises GateClosed: when the table has not been read yet.
    """
    if where is None:
        with connected(postgres_settings(pipeline).dsn) as source:
            _defined(source, pipeline, label)
        return
    target = target_of(record, label)
    if any(chunk.table == label for chunk in record.unfinished):
        raise GateClosed(f"the snapshot of {label} is not finished", "Run `airflow-cdc snapshot` first.")
    if not target.table.key:
        raise ConfigError(f"{label} has no key by which rows could be read again", "Leave --where out.")
    with _judged(label, where):
        with connected(postgres_settings(pipeline).dsn) as source:
            rows(source, sql.SQL("EXPLAIN ") + _matching_query(target.table, where))
        sink_of(pipeline).check_condition(target, where)


@contextmanager
def _judged(label: str, where: str) -> Iterator[None]:
    """Take what a server says against a statement for its judgement of the user's condition.

    :raises ConfigError: with what it has said; before anything, when the condition is more than one.
    """
    if trouble := find_trouble(where):
        raise ConfigError(
            f"--where {where!r} is not one SQL condition on {label}: {trouble}",
            "Give one SQL condition on its columns.",
        )
    try:
        yield
    except psycopg2.Error as e:
        if is_outage(e):
            raise
        raise ConfigError(
            f"--where {where!r} is not a condition on {label}: {str(e).splitlines()[0]}",
            "Give an SQL condition on its columns that can be told of each of its rows, on both sides.",
        ) from e


def insist(
    run: Run,
    read: Callable[[], T],
    waiting: Callable[[str], None] = lambda what: None,
    halted: Callable[[], bool] = lambda: False,
) -> T:
    """Read again what the job cannot do without, however long other transactions are in the way.

    :param waiting: told at each look what is waited for.
    :param halted: whether to end the wait.
    :raises OlderTransactions: when the job is to end meanwhile.
    :raises TableLocked: likewise.
    :raises Fenced: when another run has taken over meanwhile.
    """
    told = False
    while True:
        try:
            return read()
        except (OlderTransactions, TableLocked) as e:
            if not told:
                _log.warning("%s stands still: %s", run.part, e.message)
            told = True
            waiting(e.message)
            run.wait(_LOOK_SECONDS)
            if run.stopping or halted():
                raise
            run.check()
            with run.sink.fenced(run.epoch):
                pass  # still ours


def read_again(run: Run, label: str, barriers: Barriers, where: str | None = None) -> int:
    """Read a table again, or those of its rows that match a condition on either side, and commit them as a unit.

    :param barriers: of the job's re-reads.
    :returns: rows written.
    :raises OlderTransactions: as long as transactions are open that are older than the stream's position.
    :raises ConfigError: when neither the pipeline nor its file has such a table, it cannot be captured, or the
        condition fails.
    :raises CannotFollow: when the target table does not let itself be changed as the source table was.
    :raises SchemaChanged: when the table is defined otherwise than recorded, and not all of it is to be read.
    """
    if where is None:
        return adopt(run, label, barriers)
    record = existing_record(run.pipeline)
    target = target_of(record, label)
    with barriers.reading(label):
        with connected(postgres_settings(run.pipeline).dsn) as source:
            barriers.put_up(source, label)
            with _judged(label, where):
                keys = _matching_keys(source, target.table, where) | run.sink.matching_keys(target, where)
            query = _keys_query(target.table, keys)
            read = plan_read(
                source,
                postgres_settings(run.pipeline).dsn,
                target.table,
                RecordedSlot.of(record.identity).origin,
                query,
            )
        return write_rows(read, partial(_replace, run, target, keys, target), CONTROL_LOCK_SECONDS)


def _replace(
    run: Run,
    target: Target,
    keys: frozenset[tuple[str, ...]] | None,
    before: Target | None,
    batches: Iterator[pa.RecordBatch],
    finish: Callable[[], Watermark],
) -> int:
    made = transformed_rows(run.pipeline.transform, target.table, batches)
    return run.sink.replace(run.epoch, target, keys, made, finish, before)


def adopt(run: Run, label: str, barriers: Barriers) -> int:
    """Take a table as it is defined now: publish it, read it whole, and commit rows and definition as a unit.

    Every change in an older format is seen by the read, and filtered from then on.

    :returns: rows written.
    :raises CdcError: as :func:`read_again`.
    """
    with barriers.reading(label):
        if barriers.pending(label):
            with connected(postgres_settings(run.pipeline).dsn) as source:
                barriers.look(source, label)  # before all that it would cost to get there
        return _adopt(run, label, barriers)


def _adopt(run: Run, label: str, barriers: Barriers) -> int:
    pipeline = run.pipeline
    changed = ""
    for _ in range(_DEFINITIONS):
        record = existing_record(pipeline)
        require_epoch(record, run.epoch)
        before = next((target for target in record.targets if target.table.label == label), None)
        with connected(postgres_settings(pipeline).dsn, writes=True) as source:
            table = _defined(source, pipeline, label)
            changelog_names(pipeline, [table])
            recorded = RecordedSlot.of(record.identity)
            with run.sink.fenced(run.epoch), naming_holders():  # an overtaken run leaves the publication alone
                was = before.table if before else None
                published = publish_anew(
                    source, postgres_settings(pipeline).publication, was, table, recorded.published
                )
            # Those of leaves that the record does not have yet, so that none it has is without. If the others have
            # changed, nothing goes on until the table has been read.
            known = {leaf.oid for leaf in before.table.leaves} if before is not None else set[int]()
            _note(run, recorded, {leaf: entry for leaf, entry in published.items() if leaf not in known})
            barriers.put_up(source, label, published)
            read = plan_chunk_read(source, postgres_settings(pipeline).dsn, table, None, recorded.origin)
        place = (before.schema, before.name) if before is not None else target_name(pipeline, table)
        replace = partial(_replace, run, Target(pipeline.transform.table(table), *place), None, before)
        try:
            written = write_rows(read, replace, CONTROL_LOCK_SECONDS)
            _note(run, recorded, published)
            if before is None:
                write_ledger(pipeline, run.state, existing_record(pipeline))
            return written
        except SchemaChanged as e:
            changed = e.message  # between the look at the catalog and the read
    raise SchemaChanged(
        f"the definition of {label} changes faster than the table can be read; {changed}",
        "Start again when it has settled.",
    )


def _defined(connection: Connection, pipeline: Pipeline, label: str) -> Table:
    """A table as the catalog defines it now, by the rules of the file."""
    found = find(connection, postgres_settings(pipeline).tables)
    if label in found.errors:
        raise found.errors[label]
    if label not in found.tables:
        raise ConfigError(
            f"the pipeline has no table {label!r}",
            f"Name it in source.tables, or one of: {', '.join(found.tables)}.",
        )
    return found.tables[label]


def _note(run: Run, recorded: RecordedSlot, published: Mapping[int, str]) -> None:
    """Keep in the record which entries publish leaves, as far as it did not know."""
    news = {leaf: entry for leaf, entry in published.items() if recorded.published.get(leaf) != entry}
    if news:
        run.sink.note_source(run.epoch, noted_published(news))


def read_keys_again(
    run: Run,
    record: Record,
    keys: Mapping[str, frozenset[tuple[str, ...]]],
    xids: npt.NDArray[np.uint32],
) -> tuple[str, ...]:
    """Read rows again whose values the unit at hand lacks, in a snapshot that sees all its transactions.

    :param xids: the unit's transactions.
    :returns: tables that have to be read whole instead, as they are defined otherwise than recorded.
    :raises OlderTransactions: as long as they are not visible.
    """
    with connected(postgres_settings(run.pipeline).dsn) as source:
        require_visible(source, ", ".join(sorted(keys)), xids)
        reads = {
            label: plan_read(
                source,
                postgres_settings(run.pipeline).dsn,
                target_of(record, label).table,
                RecordedSlot.of(record.identity).origin,
                _keys_query(target_of(record, label).table, members),
            )
            for label, members in keys.items()
        }
    changed = []
    for label, members in keys.items():
        target = target_of(record, label)
        try:
            write_rows(reads[label], partial(_replace, run, target, members, target), CONTROL_LOCK_SECONDS)
        except SchemaChanged:
            changed.append(label)
    return tuple(changed)


def _matching_keys(connection: Connection, table: Table, where: str) -> frozenset[tuple[str, ...]]:
    """The keys of the source's rows that match a condition."""
    return frozenset(tuple(found) for found in rows(connection, _matching_query(table, where)))


def _matching_query(table: Table, where: str) -> sql.Composable:
    key = sql.SQL(", ").join(text_of(column) for column in table.key_columns)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(key, sql.Identifier(leaf.schema, leaf.name), condition(where))
        for leaf in table.leaves
    )


def _keys_query(table: Table, keys: frozenset[tuple[str, ...]]) -> sql.Composable:
    """The SELECT of the rows with given keys, every captured column as text."""
    columns = sql.SQL(", ").join(text_of(column) for column in table.columns)
    where = condition(table.where) if table.where is not None else sql.SQL("true")
    members = keys_condition(table, keys)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {} AND {}").format(
            columns, sql.Identifier(leaf.schema, leaf.name), where, members
        )
        for leaf in table.leaves
    )
