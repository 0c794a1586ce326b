"""The topic of a Kafka sink's record after the brokers have compacted it: readers find the same contents as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.contract import Sink
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink
from tests.sinks.begun_sink import LABEL, NEW, OTHER, WHOLE, Begun, begin
from tests.support.kafka_server import SECONDS, make_broker
from tests.support.kafka_sink import KafkaStore, consumed

UNITS = 30
OFTEN = {"segment.ms": "1", "min.cleanable.dirty.ratio": "0.01"}


@pytest.fixture
def begun(server_directory: Path) -> Iterator[Begun]:
    """Return a pipeline on a broker that compacts its topics ten times a second."""
    with make_broker(server_directory / "kafka-compacting", {"log.cleaner.backoff.ms": "100"}) as server:
        yield begin(KafkaStore(server.brokers, partitions=1), "changelog")


def store_of(begun: Begun) -> KafkaStore:
    assert isinstance(begun.store, KafkaStore)
    return begun.store


def reader(begun: Begun, name: str) -> Sink:
    """Return the sink of a process that has read what this one has not; by its name it has its own clients."""
    return KafkaSink(replace(store_of(begun).settings, properties=(("client.id", name),)), "p")


def journal(begun: Begun) -> str:
    assert isinstance(begun.sink, KafkaSink)
    return begun.sink.journal.topic


def offsets(begun: Begun) -> list[int]:
    """Return the offsets of the messages that the record's topic still has."""
    return [message.offset for message in consumed(store_of(begun).cluster, journal(begun))]


def end(begun: Begun) -> int:
    return store_of(begun).cluster.ends(journal(begun), [0])[0]


def alter(begun: Begun, settings: Mapping[str, str]) -> None:
    entries = [ConfigEntry(*each, incremental_operation=AlterConfigOpType.SET) for each in settings.items()]
    resource = ConfigResource(ResourceType.TOPIC, journal(begun), incremental_configs=entries)
    admin = AdminClient(store_of(begun).cluster.conf())  # keep it alive until they are altered
    admin.incremental_alter_configs([resource])[resource].result(SECONDS)


def fill(begun: Begun, first: int, last: int) -> None:
    for n in range(first, last):
        assert begun.unit(100 + n, 101 + n, begun.put(str(1000 + n), "x", "1.00", at=101 + n))


@pytest.mark.lengthy
def test_a_record_that_was_compacted_is_the_same(begun: Begun) -> None:
    begun.copy(WHOLE, NEW)
    begun.sink.add(begun.epoch, [OTHER], [Chunk(OTHER.table.label, 0, None, None)])
    fill(begun, 0, UNITS)
    behind = reader(begun, "behind")
    assert behind.record() == begun.record
    place = end(begun)
    # The next messages replace or remove all that it has read.
    fill(begun, UNITS, UNITS + 1)
    begun.sink.forget(begun.epoch, [OTHER.table.label])
    fill(begun, UNITS + 1, 2 * UNITS)
    written = offsets(begun)

    alter(begun, OFTEN)
    fill(begun, 2 * UNITS, 2 * UNITS + 1)  # this closes the segment that holds the rest
    record = begun.record
    assert await_condition(lambda: len(offsets(begun)) < len(written) / 2, SECONDS), "nothing was compacted"
    left = offsets(begun)
    assert place not in left
    assert min(left) < place
    assert reader(begun, "fresh").record() == behind.record() == begun.record == record
    assert (record.applied, [target.table.label for target in record.targets]) == (101 + 2 * UNITS, [LABEL])

    fill(begun, 2 * UNITS + 1, 3 * UNITS)
    assert reader(begun, "later").record() == behind.record() == begun.record
    assert len(begun.rows()) == 3 * UNITS + 1
