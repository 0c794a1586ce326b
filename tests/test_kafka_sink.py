"""The Kafka sink by itself, on a real broker: what it promises like every sink, and what consumers see of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_cdc_provider.demo.kafka import KafkaServer
from airflow_cdc_provider.engine.errors import CdcError, ConfigError, StreamFailed, TargetConflict
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink
from tests.kafka_sink import KafkaStore, clear, send, settings
from tests.sink_contract import (
    NEW,
    TARGET,
    WHOLE,
    ChangelogContract,
    LakeContract,
    ProtocolContract,
    begin,
    change,
)


@pytest.fixture
def store(kafka: KafkaServer) -> Iterator[KafkaStore]:
    made = KafkaStore(kafka.brokers)
    yield made
    clear(made.cluster)


class TestProtocol(ProtocolContract):
    """See :class:`ProtocolContract`."""

    mode = "changelog"


class TestChangelog(ChangelogContract, LakeContract):
    """See :class:`ChangelogContract` and :class:`LakeContract`."""


def test_a_topic_that_was_made_anew_is_refused_until_its_table_is_read_again(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    begun.copy(WHOLE, NEW)
    begun.unit(100, 200, begun.put("1", "a", "1.00"))
    store.remove(TARGET)
    store.cluster.create([store.topic(TARGET)], 3, -1, {})
    assert begun.sink.missing([TARGET]) == (TARGET,)
    with pytest.raises(StreamFailed, match="made anew") as told:
        begun.unit(200, 300, begun.put("2", "b", "2.00"))
    assert "resnapshot --table" in told.value.solution
    with pytest.raises(StreamFailed, match="made anew"):
        begun.reread(["5"], NEW)
    begun.reread(None, NEW)
    assert begun.sink.missing([TARGET]) == ()
    assert begun.unit(200, 300, begun.put("2", "b", "2.00", at=260))
    assert begun.rows() == [("2", "b", "2.00"), NEW]


def test_a_topic_that_goes_before_a_unit_is_committed_is_not_made_by_the_way(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    piece = begun.piece(begun.put("1", "a", "1.00"))
    store.remove(TARGET)
    begun.sink.end_sessions()  # a producer that knows the topic would look for it until the transaction times out
    with pytest.raises(CdcError):
        begun.sink.commit(begun.epoch, 100, 200, [piece])
    assert store.cluster.topic(store.topic(TARGET)) is None


def test_topics_of_others_that_are_called_like_records_are_passed_over(store: KafkaStore) -> None:
    store.cluster.create(["airflow_cdc.public.t"], 1, -1, {})
    for key in (None, "no JSON", "[1]", '{"id":1}'):
        send(store.cluster, "airflow_cdc.public.t", key, "{}")
    assert begin(store, "changelog").record.applied == 100


def test_a_table_does_not_get_a_topic_among_the_records(store: KafkaStore) -> None:
    sink = KafkaSink(settings(store.cluster.brokers, topic="airflow_cdc.{table}"), "p")
    with pytest.raises(ConfigError, match=r"begin with airflow_cdc\."):
        sink.prepare([TARGET], [WHOLE], {}, 100)
    assert store.names() == set()


def test_a_compacted_topic_refuses_that_a_table_is_emptied(store: KafkaStore) -> None:
    store.cluster.create([store.topic(TARGET)], 2, -1, {"cleanup.policy": "compact"})
    begun = begin(store, "changelog")
    begun.copy(WHOLE, NEW)
    with pytest.raises(TargetConflict, match="without a key") as told:
        begun.unit(100, 200, change("t", None, None, None))
    assert "cleanup.policy" in told.value.solution
    assert (begun.rows(), begun.record.applied) == ([NEW], 100)
