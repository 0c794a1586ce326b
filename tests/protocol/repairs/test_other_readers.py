"""A slot with a foreign reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import pq

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import SecondWriter
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from tests.protocol.repairs.scene import LOST, Make, assert_healed
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow


@contextmanager
def foreign_reader(pipeline: PipelineUnderTest) -> Iterator[int]:
    """Stream from the pipeline's slot in another program's session, without acknowledgments, and yield its pid."""
    names = pipeline.pipeline.source
    reader = pq.PGconn.connect(f"{names.dsn}?replication=database&application_name=somebody".encode())
    options = f"proto_version '1', publication_names '{names.publication}'"
    try:
        started = reader.exec_(f"START_REPLICATION SLOT {names.slot} LOGICAL 0/0 ({options})".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, reader.error_message
        yield reader.backend_pid
    finally:
        reader.finish()


def test_a_slot_that_somebody_else_reads_from(make_pipeline: Make) -> None:
    """The reader is reported and left alone; commands that do not need the slot still work."""
    pipeline = make_pipeline()
    active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{pipeline.pipeline.source.slot}'"
    pipeline.source(*LOST)
    before = pipeline.record
    with foreign_reader(pipeline) as pid:
        for command in (
            pipeline.apply,
            pipeline.provision,
            lambda: commands.drop(pipeline.pipeline),
            lambda: provisioning.start_over(pipeline.pipeline, takeover=False),
        ):
            with pytest.raises(SecondWriter, match=f"session {pid} of \\w+, application 'somebody'") as named:
                command()
            assert f"pg_terminate_backend({pid})" in named.value.solution
        assert commands.status(pipeline.pipeline)["slot"]["active"] is True
        assert commands.stop(pipeline.pipeline) == {"asked": []}
        assert commands.verify(pipeline.pipeline)["equal"] is False
        assert pipeline.record.applied == before.applied
        assert pipeline.source_rows(active) == [(True,)]
        pipeline.source(f"SELECT pg_terminate_backend({pid})")
        assert await_condition(lambda: pipeline.source_rows(active) == [(False,)], SECONDS)
        assert_healed(pipeline)


def test_a_walsender_that_an_earlier_run_has_left(make_pipeline: Make) -> None:
    """It carries the pipeline's name, so the next run ends it."""
    pipeline = make_pipeline()
    names = pipeline.pipeline.source
    pipeline.source(*LOST)
    left = WalReader(names.dsn, names.slot, names.publication, pipeline.record.applied)
    try:
        active = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{names.slot}'"
        assert pipeline.source_rows(active) == [(True,)]
        assert_healed(pipeline)
    finally:
        left.close()
