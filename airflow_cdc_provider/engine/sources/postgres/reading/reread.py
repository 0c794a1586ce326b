"""Reads rows again while the stream goes on, for repairs and for values that the log does not carry.

A re-read is a separate unit between two units of the stream. Its snapshot must see every transaction that the stream
has already passed. From then on, changes of its rows are filtered like those of a chunk, until the stream has passed
its high watermark. So a reader of the sink never sees a row go back to an older state.

A table that is read again as a whole is taken as it is defined at that moment. This is also how a table joins a running
pipeline, and how a schema change is followed that cannot be followed in order.
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
from psycopg2 import sql

from airflow_cdc_provider.engine.changes.row_transform import transformed_rows
from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    GateClosed,
    OlderTransactions,
    SchemaChanged,
    TableLocked,
)
from airflow_cdc_provider.engine.core.record import Record, Target, target_of
from airflow_cdc_provider.engine.core.source_rows import SourceRows
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.column_text import text_of
from airflow_cdc_provider.engine.postgres.connection import Connection, condition, connected, rows
from airflow_cdc_provider.engine.postgres.driver_errors import is_outage
from airflow_cdc_provider.engine.postgres.lock_holders import CONTROL_LOCK_SECONDS, naming_holders
from airflow_cdc_provider.engine.postgres.sql_condition import find_syntax_problem
from airflow_cdc_provider.engine.runs.commit_records import existing_record, sink_of
from airflow_cdc_provider.engine.runs.record_copy import write_record_copy
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.runs.single_writer import require_epoch
from airflow_cdc_provider.engine.runs.sink_checks import changelog_names, target_name
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import find
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import republish
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import keys_condition
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers, require_visible
from airflow_cdc_provider.engine.sources.postgres.reading.snapshot_read import plan_chunk_read, plan_read, write_rows
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot, noted_published
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings

T = TypeVar("T")
_DEFINITIONS = 5
_RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


def check(pipeline: Pipeline, record: Record, label: str, where: str | None) -> None:
    """Refuse a re-read that is not possible, before anything is touched.

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
    """Raise a server's error about a statement in the block as an error in the user's condition.

    :raises ConfigError: with the server's message; before the block, if the text is not a single condition.
    """
    if trouble := find_syntax_problem(where):
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
            "Give an SQL condition on its columns that can be evaluated for each of its rows, on both sides.",
        ) from e


def retry_while_blocked(
    run: Run,
    read: Callable[[], T],
    waiting: Callable[[str], None] = lambda what: None,
    halted: Callable[[], bool] = lambda: False,
) -> T:
    """Do a read that the job cannot do without, and retry it as long as other transactions block it.

    :param waiting: called at each attempt with what is waited for.
    :param halted: returns whether to end the wait.
    :raises OlderTransactions: when the job is to end meanwhile.
    :raises TableLocked: likewise.
    :raises Fenced: when another run has taken over meanwhile.
    """
    logged = False
    while True:
        try:
            return read()
        except (OlderTransactions, TableLocked) as e:
            if not logged:
                _log.warning("%s is blocked: %s", run.part, e.message)
            logged = True
            waiting(e.message)
            run.wait(_RETRY_SECONDS)
            if run.stopping or halted():
                raise
            run.check()
            with run.sink.fenced(run.epoch):
                pass  # the epoch is still ours


def read_again(run: Run, label: str, barriers: Barriers, where: str | None = None) -> int:
    """Read a table again, or those of its rows that match a condition on either side, and commit them as a unit.

    :param barriers: of the job's re-reads.
    :returns: rows written.
    :raises OlderTransactions: as long as transactions are open that are older than the stream's position.
    :raises ConfigError: when neither the pipeline nor its file has such a table, it cannot be captured, or the
        condition fails.
    :raises CannotFollow: when the target table cannot be changed as the source table was.
    :raises SchemaChanged: when the table is not defined as recorded, and only some of its rows are to be read.
    """
    if where is None:
        return reread_as_defined(run, label, barriers)
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
    rows: SourceRows,
) -> int:
    made = transformed_rows(run.pipeline.transform, target.table, rows)
    return run.sink.replace(run.epoch, target, keys, made, before)


def reread_as_defined(run: Run, label: str, barriers: Barriers) -> int:
    """Read a table as it is defined now: publish it, read all rows, and commit rows and definition as a unit.

    The read sees every change in an older format, and these are filtered out from then on.

    :returns: rows written.
    :raises CdcError: as :func:`read_again`.
    """
    with barriers.reading(label):
        if barriers.pending(label):
            with connected(postgres_settings(run.pipeline).dsn) as source:
                barriers.check(source, label)  # before the expensive steps that lead there
        return _reread(run, label, barriers)


def _reread(run: Run, label: str, barriers: Barriers) -> int:
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
            with run.sink.fenced(run.epoch), naming_holders():  # a run that was taken over leaves the publication alone
                was = before.table if before else None
                published = republish(source, postgres_settings(pipeline).publication, was, table, recorded.published)
            # Record the entries of leaves that the record does not have yet, so that each recorded leaf has one. If the
            # entries of others have changed, nothing goes on until the table has been read.
            known = {leaf.oid for leaf in before.table.leaves} if before is not None else set[int]()
            _record_published(run, recorded, {leaf: entry for leaf, entry in published.items() if leaf not in known})
            barriers.put_up(source, label, published)
            read = plan_chunk_read(source, postgres_settings(pipeline).dsn, table, None, recorded.origin)
        place = (before.schema, before.name) if before is not None else target_name(pipeline, table)
        replace = partial(_replace, run, Target(pipeline.transform.table(table), *place), None, before)
        try:
            written = write_rows(read, replace, CONTROL_LOCK_SECONDS)
            _record_published(run, recorded, published)
            if before is None:
                write_record_copy(pipeline, run.state, existing_record(pipeline))
            return written
        except SchemaChanged as e:
            changed = e.message  # after the catalog was looked up and before the read
    raise SchemaChanged(
        f"the definition of {label} changes faster than the table can be read; {changed}",
        "Start again when it has settled.",
    )


def _defined(connection: Connection, pipeline: Pipeline, label: str) -> Table:
    """Return a table as the catalog defines it now, by the rules of the file."""
    found = find(connection, postgres_settings(pipeline).tables)
    if label in found.errors:
        raise found.errors[label]
    if label not in found.tables:
        raise ConfigError(
            f"the pipeline has no table {label!r}",
            f"Name it in source.tables, or one of: {', '.join(found.tables)}.",
        )
    return found.tables[label]


def _record_published(run: Run, recorded: RecordedSlot, published: Mapping[int, str]) -> None:
    """Record which catalog entries publish leaves, if the record does not have them yet."""
    news = {leaf: entry for leaf, entry in published.items() if recorded.published.get(leaf) != entry}
    if news:
        run.sink.record_source(run.epoch, noted_published(news))


def read_keys_again(
    run: Run,
    record: Record,
    keys: Mapping[str, frozenset[tuple[str, ...]]],
    xids: npt.NDArray[np.uint32],
) -> tuple[str, ...]:
    """Read rows again whose values the current unit lacks, in a snapshot that sees all its transactions.

    :param xids: the unit's transactions.
    :returns: tables that have to be read as a whole instead, since they are not defined as recorded.
    :raises OlderTransactions: as long as the transactions are not visible.
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
    """Return the keys of the source's rows that match a condition."""
    return frozenset(tuple(found) for found in rows(connection, _matching_query(table, where)))


def _matching_query(table: Table, where: str) -> sql.Composable:
    key = sql.SQL(", ").join(text_of(column) for column in table.key_columns)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(key, sql.Identifier(leaf.schema, leaf.name), condition(where))
        for leaf in table.leaves
    )


def _keys_query(table: Table, keys: frozenset[tuple[str, ...]]) -> sql.Composable:
    """Return the SELECT of the rows with given keys, every captured column as text."""
    columns = sql.SQL(", ").join(text_of(column) for column in table.columns)
    where = condition(table.where) if table.where is not None else sql.SQL("true")
    members = keys_condition(table, keys)
    return sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT {} FROM ONLY {} WHERE {} AND {}").format(
            columns, sql.Identifier(leaf.schema, leaf.name), where, members
        )
        for leaf in table.leaves
    )
