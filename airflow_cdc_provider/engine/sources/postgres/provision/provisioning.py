"""Provisions a pipeline: publication, slot, barrier, target tables, commit record, plan.

The publication comes first, then the slot, then the barrier. From there on every transaction that the slot will not
stream is visible to every new snapshot, and chunks may be read. The commit record comes after the slot, with the slot's
start as applied LSN. Existing objects are verified, not created again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from psycopg2 import sql

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, GateClosed
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.core.record import Record, Target, require_kind
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres import slots
from airflow_cdc_provider.engine.postgres.connection import Connection, connected, scalar
from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS
from airflow_cdc_provider.engine.runs.commit_records import (
    existing_record,
    identity_of,
    record_if_any,
    require_targets,
    sink_of,
)
from airflow_cdc_provider.engine.runs.record_copy import RecordCopy, read_record_copy, write_record_copy
from airflow_cdc_provider.engine.runs.single_writer import refuse_second_writer, require_epoch, take_epoch
from airflow_cdc_provider.engine.runs.sink_checks import require_mode, target_name, targets_of
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve
from airflow_cdc_provider.engine.sources.postgres.catalog.catalog import ancestors
from airflow_cdc_provider.engine.sources.postgres.catalog.publication import (
    create_publication,
    drop_publication,
    published_entries,
    published_otherwise,
    unpublish,
)
from airflow_cdc_provider.engine.sources.postgres.provision import slot
from airflow_cdc_provider.engine.sources.postgres.provision.gate import gate, record_passage, require_primary
from airflow_cdc_provider.engine.sources.postgres.provision.preflight import check_publication
from airflow_cdc_provider.engine.sources.postgres.provision.provision_lock import take_provision_lock
from airflow_cdc_provider.engine.sources.postgres.provision.removal import PROVISIONING, remove_slot
from airflow_cdc_provider.engine.sources.postgres.provision.slot_session import drop_own_slot, slot_session
from airflow_cdc_provider.engine.sources.postgres.reading.chunk_sql import plan
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot, noted_published
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from airflow_cdc_provider.engine.state import location
from airflow_cdc_provider.engine.state.files import State


def provision(pipeline: Pipeline, takeover: bool) -> tuple[Record, slots.SlotState]:
    """Create, or verify, publication, slot, target tables, plan and commit record; take the epoch of a run.

    :returns: the commit record and the slot.
    :raises CdcError: when that is not possible. Then nothing has been changed, except in sinks that were prepared
        before another one refused; the next attempt goes on with them.
    """
    state = State(pipeline.state)
    names = postgres_settings(pipeline)
    with connected(names.dsn, writes=True) as source:
        take_provision_lock(source, pipeline.name, takeover)
        record = record_if_any(pipeline)
        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        tables = resolve(source, names.tables)
        check_publication(source, pipeline, tables, _settled(record, tables))
        new = [branch for branch in pipeline.branches if record is None or sink_of(branch).record() is None]
        if record is None:
            _refuse_foreign_slot(source, pipeline, state)
            with _new_slot(source, pipeline, state, tables) as (made, start):
                chunks = _plan(source, pipeline, tables)
                for branch in new:
                    _prepare(branch, tables, chunks, made, start)
        else:
            present = replace(pipeline, sinks=tuple(b.sink for b in pipeline.branches if b not in new))
            for branch in present.branches:
                own = existing_record(branch)
                require_kind("postgres", own.identity)
                require_mode(branch, own.identity)
                _refuse_other_names(branch, own)
            epoch = take_epoch(present, state, takeover)
            for branch in present.branches:
                _update(source, branch, epoch, tables)
            if new:
                # Transactions that the slot no longer streams get into the new sinks if every snapshot sees them.
                record = existing_record(present)
                slot.barrier(source)
                chunks = _plan(source, pipeline, tables)
                for branch in new:
                    _prepare(branch, tables, chunks, RecordedSlot.of(record.identity), record.applied)
        if new:
            epoch = take_epoch(pipeline, state, takeover)
        state.remove(PROVISIONING)
        record = existing_record(pipeline)
        require_epoch(record, epoch)
        write_record_copy(pipeline, state, record)
        found = [gate(source, names, partial(existing_record, branch)).slot for branch in pipeline.branches]
    return record, found[0]


def _prepare(
    branch: Pipeline, tables: Sequence[Table], chunks: Sequence[Chunk], made: RecordedSlot, start: Lsn
) -> None:
    """Prepare a sink with its first record."""
    sink_of(branch).prepare(targets_of(branch, tables), chunks, identity_of(branch, made.to_notes()), start)


def _update(source: Connection, branch: Pipeline, epoch: int, tables: Sequence[Table]) -> None:
    """Update a sink's record to the tables that the file covers now."""
    sink, names = sink_of(branch), postgres_settings(branch)
    record = existing_record(branch)
    require_epoch(record, epoch)
    passage = gate(source, names, partial(existing_record, branch))
    gone = _gone_tables(source, record, tables)
    if RecordedSlot.of(record.identity).created_publication:
        left = {leaf.oid for target in gone for leaf in target.table.leaves}
        unpublish(source, names.publication, left - {leaf.oid for table in tables for leaf in table.leaves})
    sink.forget(epoch, [target.table.label for target in gone])
    record_passage(sink, record, passage)
    record = existing_record(branch)
    require_targets(branch, sink, record)
    recorded = {target.table.label for target in record.targets}
    added = [table for table in tables if table.label not in recorded]
    if added:
        # A detached partition may still be published by the rule of the table that it was in.
        otherwise = published_otherwise(source, names.publication, added)[1]
        unpublish(source, names.publication, [leaf.oid for leaf in otherwise])
        create_publication(source, names.publication, added)
        # Recorded before the tables are, so that later alterations are found, wherever this is interrupted.
        sink.record_source(epoch, noted_published(published_entries(source, names.publication, added)))
        slot.barrier(source)
        sink.add(epoch, targets_of(branch, added), _plan(source, branch, added))


def _refuse_foreign_slot(source: Connection, pipeline: Pipeline, state: State) -> None:
    """Refuse a slot that is not in the record, unless an interrupted provisioning has left it."""
    name = postgres_settings(pipeline).slot
    found = slots.read_slot(source, name)
    if found is not None and (found.active or (state.read(PROVISIONING) or {}).get("slot") != name):
        raise GateClosed(
            f"replication slot {name!r} exists, but the sink has no record of pipeline {pipeline.name!r} with it",
            f"If the slot is not in use, drop it: SELECT pg_drop_replication_slot('{name}'); otherwise give the"
            " pipeline another slot name (`source.slot`).",
        )


def _refuse_taken_slot(source: Connection, name: str) -> None:
    """Refuse a slot of another plugin or database, which is never ours and must not be dropped."""
    found = slots.read_slot(source, name)
    if found is not None and not slots.is_ours(source, found):
        raise GateClosed(
            f"replication slot {name!r} is not ours: plugin {found.plugin!r} in database {found.database!r}",
            "Give the pipeline another slot name (`source.slot`), then run `airflow-cdc resnapshot --all`.",
        )


def _refuse_other_names(pipeline: Pipeline, record: Record) -> None:
    """Refuse a file that changes the names of targets, since these have been written under their names."""
    for target in record.targets:
        if (target.schema, target.name) != target_name(pipeline, target.table):
            raise ConfigError(
                f"sink.schema: {pipeline.sink.schema!r}, but {target.table.label} has been provisioned into"
                f" {target.schema}.{target.name}",
                "Put the schema back, or use another pipeline name for the other schema.",
            )


@contextmanager
def _new_slot(
    source: Connection, pipeline: Pipeline, state: State, tables: Sequence[Table]
) -> Iterator[tuple[RecordedSlot, Lsn]]:
    """Create publication and slot and pass the barrier; give their description, and where the slot streams from.

    After a failure, also one in the block, they are removed, unless the block has written the record, or another run
    has begun to do the same meanwhile. After a kill, the next attempt removes them.
    """
    start = None
    names = postgres_settings(pipeline)
    ours = {"slot": names.slot, "attempt": uuid.uuid4().hex}
    state.write(PROVISIONING, ours)
    drop_own_slot(names, source)
    _refuse_taken_slot(source, names.slot)
    created = create_publication(source, names.publication, tables)
    try:
        entries = published_entries(source, names.publication, tables)
        with slot_session(names, source) as session:
            scalar(source, "SELECT 1")  # raises an error if another command has taken over
            start = slot.create_slot(session, names.slot)
        slot.barrier(source)
        identity = slots.read_identity(source, names.slot, names.publication)
        yield RecordedSlot(identity, created, published=entries), start
    except BaseException:
        if state.read_sound(PROVISIONING, dict[str, Any]) == ours and not _may_be_recorded(pipeline, start):
            drop_own_slot(names, source)
            if created:
                drop_publication(source, names.publication)
            state.remove(PROVISIONING)
        raise


def _may_be_recorded(pipeline: Pipeline, start: Lsn | None) -> bool:
    """Return whether a record may rely on the slot that streams from ``start``; true if a sink cannot be read."""
    if start is None:
        return False
    try:
        records = [sink_of(branch).record() for branch in pipeline.branches]
    except CdcError:
        return True
    except DRIVER_ERRORS:
        return True
    return any(record is not None and record.applied == start for record in records)


def _settled(record: Record | None, tables: Sequence[Table]) -> Sequence[Table]:
    """Return the tables, with those of their leaves that have to be published as captured already."""
    if record is None:
        return tables
    recorded = {(target.table.label, leaf.oid) for target in record.targets for leaf in target.table.leaves}
    return [
        replace(table, leaves=tuple(leaf for leaf in table.leaves if (table.label, leaf.oid) in recorded))
        for table in tables
    ]


def _gone_tables(source: Connection, record: Record, tables: Sequence[Table]) -> list[Target]:
    """Return recorded tables that the file no longer covers and that are gone, or partitions of covered tables.

    :raises ConfigError: when the source still has another one that is not covered, whose changes would be lost.
    """
    covered = {table.label: table.oid for table in tables}
    gone = [target for target in record.targets if target.table.label not in covered]
    oids: dict[int, str] = {}
    for target in gone:
        name = sql.Identifier(target.table.schema, target.table.name).as_string(source)
        oid = scalar(source, "SELECT to_regclass(%s)::oid::int8", [name])
        if oid is not None:
            oids[oid] = target.table.label
    above = ancestors(source, list(oids))
    here = [label for oid, label in oids.items() if set(covered.values()).isdisjoint(above[oid])]
    if here:
        raise ConfigError(
            f"source.tables no longer covers {', '.join(here)}, which this pipeline captures",
            "Put the tables back, or drop the pipeline and provision it again without them.",
        )
    return gone


def _plan(source: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> list[Chunk]:
    """Plan the chunks of tables, which are recorded together with the tables."""
    if pipeline.snapshot.mode == "never":
        return []
    return [chunk for table in tables for chunk in plan(source, table, pipeline.snapshot.chunk_rows)]


def start_over(pipeline: Pipeline, takeover: bool) -> int:
    """Recreate publication and slot, and plan every table as one chunk that replaces it, so that readers see no gap.

    A lost record is created again, if the copy in the state proves what the pipeline has made.

    :returns: the epoch under which the tables are to be read.
    :raises SecondWriter: when another run is alive and ``takeover`` is not set, or another program reads from the slot.
    :raises ConfigError: when another type of source has filled a sink, or the file has other names or modes.
    :raises GateClosed: when the slot's name belongs to others, or there is neither a record nor its copy.
    :raises ForeignTable: when a target is not ours by record or copy; slot and publication stay then.
    """
    state = State(pipeline.state)
    location.refuse_others(state, pipeline.name)
    with connected(postgres_settings(pipeline).dsn, writes=True) as source:
        take_provision_lock(source, pipeline.name, takeover)
        record, copy = record_if_any(pipeline), read_record_copy(pipeline, state)
        known = record or copy
        if known is None:
            raise GateClosed(
                f"the sink has no commit record of pipeline {pipeline.name!r}, and the state {pipeline.state} has no"
                " copy of it",
                "Run `airflow-cdc provision` (or `run`). If both have been lost, first empty or drop the target tables,"
                f" and drop the slot (SELECT pg_drop_replication_slot('{postgres_settings(pipeline).slot}')).",
            )
        branches = [(each, sink_of(each).record(), read_record_copy(each, state)) for each in pipeline.branches]
        for branch, own, vouching in branches:
            either = own or vouching
            if either is not None:
                require_kind("postgres", either.identity)
                require_mode(branch, either.identity)
            if own is not None:
                _refuse_other_names(branch, own)
        before = RecordedSlot.of(known.identity)
        require_primary(source)
        tables = resolve(source, postgres_settings(pipeline).tables)
        if postgres_settings(pipeline).slot != before.slot_identity.slot:
            _refuse_foreign_slot(source, pipeline, state)
        _refuse_taken_slot(source, postgres_settings(pipeline).slot)
        if not before.created_publication:
            check_publication(source, pipeline, tables, tables)  # it is not changed
        present = replace(pipeline, sinks=tuple(branch.sink for branch, own, _ in branches if own is not None))
        epoch = 0

        def begin(made: RecordedSlot, start: Lsn, rehearsal: bool = False) -> None:
            for branch, own, vouching in branches:
                _begin_again(
                    sink_of(branch),
                    None if own is None else own.epoch if rehearsal else epoch,
                    targets_of(branch, tables),
                    vouching,
                    identity_of(branch, made.to_notes()),
                    start,
                    rehearsal,
                )

        refuse_second_writer(state, record.epoch if record else 0, None, takeover)
        begin(before, slots.flushed(source), rehearsal=True)  # while the old slot and record are still there
        if present.sinks:
            epoch = take_epoch(present, state, takeover)
        state.write(PROVISIONING, {"slot": postgres_settings(pipeline).slot})
        remove_slot(source, pipeline, record, state)
        with _new_slot(source, pipeline, state, tables) as (made, start):
            created = made.created_publication or before.created_publication
            begin(replace(made, created_publication=created), start)
            if present.sinks != pipeline.sinks:
                epoch = take_epoch(pipeline, state, takeover)
    state.remove(PROVISIONING)
    return epoch


def _begin_again(
    sink: Sink,
    epoch: int | None,
    targets: Sequence[Target],
    copy: RecordCopy | None,
    identity: Mapping[str, Any],
    start: Lsn,
    rehearsal: bool = False,
) -> None:
    """Restart a record under its epoch; or create it again, with the targets that its copy proves to be ours.

    :param rehearsal: see :meth:`.Sink.prepare`.
    """
    if epoch is not None:
        sink.restart(epoch, targets, identity, start, rehearsal)
        return
    known = copy.targets if copy is not None else {}
    ours = {t.table.label for t in targets if known.get(t.table.label) == (t.schema, t.name)}
    chunks = [Chunk(target.table.label, 0, None, None) for target in targets]
    sink.prepare(targets, chunks, identity, start, ours, rehearsal)
