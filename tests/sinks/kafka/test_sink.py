"""The Kafka sink alone, on a real broker: the contract of all sinks, and the view of consumers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    CdcError,
    ConfigError,
    GateClosed,
    LimitExceeded,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column
from airflow_cdc_provider.engine.sinks.kafka import record_topic
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink
from local_servers.kafka import KafkaServer
from tests.sinks.begun_sink import IDENTITY, NEW, TABLE, TARGET, WATERMARK, WHOLE, begin, change
from tests.sinks.contract import ProtocolContract
from tests.sinks.contract_rows import ChangelogContract, LakeContract
from tests.support.given_rows import GivenRows
from tests.support.kafka_server import clear
from tests.support.kafka_sink import KafkaStore, send, settings


@pytest.fixture
def store(kafka: KafkaServer) -> Iterator[KafkaStore]:
    made = KafkaStore(kafka.brokers)
    yield made
    clear(made.cluster)


class TestProtocol(ProtocolContract):
    """The contract of the protocol on Kafka."""

    mode = "changelog"


class TestChangelog(ChangelogContract, LakeContract):
    """The contracts of changelogs and lakes on Kafka."""


def test_a_topic_that_was_made_anew_is_refused_until_its_table_is_read_again(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    begun.copy(WHOLE, NEW)
    begun.unit(100, 200, begun.put("1", "a", "1.00"))
    store.remove(TARGET)
    store.cluster.create([store.topic(TARGET)], 3, -1, {})
    assert begun.sink.missing([TARGET]) == (TARGET,)
    with pytest.raises(StreamFailed, match="has been recreated") as told:
        begun.unit(200, 300, begun.put("2", "b", "2.00"))
    assert "resnapshot --table" in told.value.solution
    with pytest.raises(StreamFailed, match="has been recreated"):
        begun.reread(["5"], NEW)
    begun.reread(None, NEW)
    assert begun.sink.missing([TARGET]) == ()
    assert begun.unit(200, 300, begun.put("2", "b", "2.00", at=260))
    assert begun.rows() == [("2", "b", "2.00"), NEW]


def test_a_topic_that_goes_before_a_unit_is_committed_is_not_made_by_the_way(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    piece = begun.piece(begun.put("1", "a", "1.00"))
    store.remove(TARGET)
    begun.sink.end_sessions()  # otherwise a producer would look for the topic until its timeout
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


def configure(store: KafkaStore, topic: str, settings: Mapping[str, str]) -> None:
    """Alter a topic, as its administrator would."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    client = AdminClient(store.cluster.conf())
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    client.incremental_alter_configs([resource])[resource].result(30)


def test_a_topic_that_would_forget_the_record_is_refused(store: KafkaStore) -> None:
    store.cluster.create(["airflow_cdc.p"], 1, -1, {})
    with pytest.raises(TargetConflict, match=r"cleanup\.policy delete") as told:
        begin(store, "changelog")
    assert "cleanup.policy=compact,delete.retention.ms=86400000" in told.value.solution
    configure(store, "airflow_cdc.p", {"cleanup.policy": "compact", "delete.retention.ms": "60000"})
    with pytest.raises(TargetConflict, match=r"delete\.retention\.ms 60000"):
        begin(store, "changelog")
    configure(store, "airflow_cdc.p", {"delete.retention.ms": "86400000"})
    begun = begin(store, "changelog")
    configure(store, "airflow_cdc.p", {"cleanup.policy": "compact,delete"})
    with pytest.raises(TargetConflict, match="compact,delete"):
        begun.sink.take_epoch("next")
    assert begun.record.epoch == begun.epoch


def test_a_record_without_its_source_is_not_whole(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    for name in IDENTITY:
        send(store.cluster, "airflow_cdc.p", json.dumps(["source", name], separators=(",", ":")), None)
    with pytest.raises(GateClosed, match="is incomplete"):
        begun.sink.record()


def test_a_record_whose_end_the_brokers_have_lost_is_read_anew(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    assert isinstance(begun.sink, KafkaSink)
    before = begun.record
    read = record_topic._reads[os.getpid(), begun.sink.journal]
    read.contents["head"] = {**read.contents["head"], "owner": "of an entry that is lost", "epoch": 0}
    read.offset += 100
    assert begun.record == before


def test_a_table_that_joins_by_being_read_again_gets_no_topic_of_another(store: KafkaStore) -> None:
    begun = begin(store, "changelog")
    table = replace(TABLE, oid=9, name="Ord/ers")
    with pytest.raises(ConfigError, match=r"would share the topic copy\.Ord_ers"):
        begun.sink.replace(begun.epoch, Target(table, "copy", "Ord/ers"), None, GivenRows([], lambda: WATERMARK), None)
    assert begun.record.targets == (TARGET,)


def test_a_request_of_very_many_keys_is_recorded_in_parts(store: KafkaStore) -> None:
    """A message of the record is at most as large as brokers accept."""
    begun = begin(store, "changelog")
    begun.copy(WHOLE, NEW)
    keys = [f"{n:040}" for n in range(40_000)]
    assert begun.reread(keys, (keys[0], "again", "1.00")) == 1
    reread = [chunk for chunk in begun.record.chunks if chunk.keys is not None]
    assert len(reread) > 1
    assert sorted(key for chunk in reread for (key,) in chunk.keys or ()) == keys
    assert sum(chunk.rows for chunk in reread) == 1
    assert {chunk.watermark for chunk in reread} == {WATERMARK}
    assert begun.unit(100, 200, begun.put("1", "a", "1.00"))
    assert [chunk.keys for chunk in begun.record.chunks] == [None]


def test_rows_that_the_client_does_not_take_are_said_to_be_too_large(store: KafkaStore) -> None:
    store.settings = replace(store.settings, properties=(("message.max.bytes", "100000"),))
    begun = begin(store, "changelog")
    begun.copy(WHOLE, NEW)
    noise = Random(1).randbytes(100_000).hex()
    with pytest.raises(LimitExceeded, match=r"stage rows in topic airflow_cdc\.p\.staging") as told:
        begun.unit(100, 200, begun.put("1", noise, "1.00"))
    assert "message.max.bytes" in told.value.solution
    assert begun.unit(100, 200, begun.put("2", "small", "1.00"))


def test_columns_that_avro_takes_for_one_are_refused(store: KafkaStore) -> None:
    columns = (
        *TABLE.columns,
        Column("no te", "text", 25, None, False, True),
        Column("no_te", "text", 25, None, False, True),
    )
    clashing = replace(TARGET, table=replace(TABLE, columns=columns))
    sink = KafkaSink(settings(store.cluster.brokers, format="avro", registry="http://127.0.0.1:1"), "p")
    with pytest.raises(ConfigError, match="'no te' and 'no_te'"):
        sink.prepare([clashing], [WHOLE], IDENTITY, 100)
    assert store.names() == set()
    sink.prepare([TARGET], [WHOLE], IDENTITY, 100)
    epoch = sink.take_epoch("test")
    with pytest.raises(CannotFollow, match="'no te' and 'no_te'"):
        sink.redefine(epoch, TARGET, clashing)
    with pytest.raises(ConfigError, match="'no te' and 'no_te'"):
        sink.replace(epoch, clashing, None, GivenRows([], lambda: WATERMARK), TARGET)
