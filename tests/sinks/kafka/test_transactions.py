"""Transactions on a real broker: fences, timeouts, a broker's end, and messages that are too large."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_cdc_provider.engine.core.errors import (
    ConfigError,
    ConnectionFailed,
    Failpoint,
    Fenced,
    GateClosed,
    LimitExceeded,
    MissingPrivilege,
)
from airflow_cdc_provider.engine.core.failpoint import VARIABLE
from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.sinks.kafka import transactions
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX, Journal
from airflow_cdc_provider.engine.sinks.kafka.sink import KafkaSink
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Contents
from local_servers.kafka import KafkaServer, Login
from tests.sinks.begun_sink import IDENTITY, TARGET, WHOLE, Begun, begin
from tests.support.kafka_server import clear, make_broker
from tests.support.kafka_sink import KafkaStore, consumed

STREAM = f"{PREFIX}p.stream"
TIMEOUTS = r"sink\.transaction_timeout .* transaction\.max\.timeout\.ms"


@pytest.fixture
def store(kafka: KafkaServer) -> Iterator[KafkaStore]:
    """Return a store whose topics have one partition, so that an open transaction blocks all of it."""
    made = KafkaStore(kafka.brokers, partitions=1)
    yield made
    clear(made.cluster)


@pytest.fixture
def begun(store: KafkaStore) -> Begun:
    return begin(store, "changelog")


def stream(begun: Begun, **settings: Any) -> Begun:
    """Return the part that streams."""
    assert isinstance(begun.sink, KafkaSink)
    return replace(begun, sink=replace(begun.sink, part="stream", settings=replace(begun.sink.settings, **settings)))


def keys(begun: Begun, committed: bool = True) -> list[int]:
    assert isinstance(begun.store, KafkaStore)
    found = consumed(begun.store.cluster, begun.store.topic(TARGET), committed)
    return sorted(json.loads(message.value or b"")["id"] for message in found)


def zombie(store: KafkaStore, transactional_id: str) -> Producer:
    """Open a transaction with a message under a foreign ``transactional.id``."""
    producer = Producer(store.cluster.conf(transactional_id=transactional_id))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(store.topic(TARGET), b'{"id":0}', b"zombie", 0)
    producer.flush(30)
    return producer


def test_what_a_zombie_has_open_is_aborted_when_the_epoch_is_taken(begun: Begun, store: KafkaStore) -> None:
    part = stream(begun)
    part.unit(100, 200, begun.put("1", "a", "1.00"))
    overtaking = zombie(store, STREAM)
    assert not _all_is_settled(store)
    begun.sink.take_epoch("another")  # in the process that was overtaken
    assert await_condition(lambda: _all_is_settled(store), 30)
    with pytest.raises(KafkaException):
        overtaking.commit_transaction(30)
    assert keys(begun) == [1]
    assert keys(begun, committed=False) == [0, 1]


def _all_is_settled(store: KafkaStore) -> bool:
    """Return whether no transaction is open in the target's topic."""
    topic = store.cluster.topic(store.topic(TARGET))
    assert topic is not None
    return store.cluster.committed_ends([topic]) == {topic.name: store.cluster.ends(topic.name, [0])}


def test_parts_of_a_run_commit_beside_each_other(begun: Begun, store: KafkaStore) -> None:
    """Each has its own ``transactional.id``: neither waits for the other's open transaction, nor ends it."""
    parts = [stream(begun), replace(begun, sink=KafkaSink(store.settings, "p", "snapshot-0"))]
    assert parts[0].unit(100, 200, begun.put("1", "a", "1.00"))
    standing = zombie(store, STREAM)
    assert parts[1].copy(WHOLE, ("5", "read", "7.00")) == 1
    standing.commit_transaction(30)
    for n, start in enumerate((200, 300)):
        assert parts[0].unit(start, start + 100, begun.put(str(n + 2), "a", "1.00"))
    contents = parts[0].sink.journal.contents()  # type: ignore[attr-defined]
    assert set(contents["writers"]) == {"stream", "snapshot-0"}
    found = consumed(store.cluster, store.topic(TARGET))
    assert {json.loads(message.value or b"")["id"] for message in found} == {None, 0, 1, 2, 3, 5}  # None: read whole


def test_a_commit_is_taken_up_again_when_somebody_has_taken_the_id(begun: Begun, store: KafkaStore) -> None:
    part = stream(begun)
    part.unit(100, 200, begun.put("1", "a", "1.00"))
    piece = part.piece(begun.put("2", "b", "2.00"))
    other = zombie(store, STREAM)
    assert part.sink.commit(part.epoch, 200, 300, [piece])
    assert keys(begun) == [1, 2]
    del other


@pytest.mark.parametrize("overtakes", [False, True], ids=["same epoch", "next epoch"])
def test_what_was_decided_before_somebody_else_committed_is_not_committed(
    begun: Begun, store: KafkaStore, monkeypatch: pytest.MonkeyPatch, overtakes: bool
) -> None:
    """The id is acquired before the record is read, so a process that commits afterwards has taken it over."""
    part = stream(begun)
    part.sink._join(part.epoch)  # type: ignore[attr-defined]
    piece = part.piece(begun.put("1", "a", "1.00"))
    part.sink.end_sessions()  # so that it has to acquire the id again
    other = stream(begun, transaction_timeout=299.0)  # this name gives it its own clients
    contents, read = Journal.contents, []

    def slow_once(self: Journal, patience: float | None = None) -> Contents | None:
        found = contents(self, patience)
        if patience is not None and not read:
            read.append(found)
            epoch = other.sink.take_epoch("another") if overtakes else other.epoch
            assert replace(other, epoch=epoch).unit(100, 200, begun.put("2", "b", "2.00"))
        return found

    monkeypatch.setattr(Journal, "contents", slow_once)
    with pytest.raises(Fenced) if overtakes else nullcontext():
        assert not part.sink.commit(part.epoch, 100, 200, [piece])
    assert [found["head"]["applied"] for found in read] == ["0/64"]
    assert keys(begun) == [2]


class Unheard(Producer):
    """A producer whose transactions are committed or not, and which does not learn the outcome."""

    commits, times = True, 1

    def commit_transaction(self, *args: Any) -> None:
        if Unheard.times == 0:
            return super().commit_transaction(*args)
        Unheard.times -= 1
        if Unheard.commits:
            super().commit_transaction(*args)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "it does not say", False, True))


@pytest.fixture
def unheard(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Return a part whose next transaction is committed without an answer."""
    monkeypatch.setattr(transactions, "Producer", Unheard)
    monkeypatch.setattr(Unheard, "commits", True)
    monkeypatch.setattr(Unheard, "times", 1)
    return replace(begun, sink=KafkaSink(begun.store.settings, "p", uuid.uuid4().hex))  # type: ignore[attr-defined]


def joined(part: Begun, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Return the part after it has written once."""
    with monkeypatch.context() as patch:
        patch.setattr(Unheard, "times", 0)
        part.sink._join(part.epoch)  # type: ignore[attr-defined]
    return part


def test_a_unit_that_was_committed_unheard_is_not_committed_again(
    unheard: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(unheard, monkeypatch).unit(100, 200, unheard.put("1", "a", "1.00"))
    assert Unheard.times == 0
    assert keys(unheard) == [1]
    assert unheard.record.applied == 200


def test_chunks_that_were_committed_unheard_are_not_committed_again(
    unheard: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(unheard, monkeypatch).copy(WHOLE, ("5", "read", "7.00"))
    assert Unheard.times == 0
    assert keys(unheard) == [5]
    assert unheard.record.unfinished == ()


@pytest.mark.parametrize("before", [False, True], ids=["empty", "filled"])
def test_a_re_read_that_was_committed_unheard_is_not_committed_again(
    unheard: Begun, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    if before:
        joined(unheard, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(Unheard, "times", 0)
            unheard.copy(WHOLE, ("4", "read", "7.00"))
    assert joined(unheard, monkeypatch).reread(None, ("5", "read", "7.00")) == 1
    assert Unheard.times == 0
    assert [event.row[0] for event in unheard.events()] == (["4", None, "5"] if before else ["5"])
    assert unheard.reread(None, ("6", "read", "7.00")) == 1  # another read at the same place in the log
    assert [row[0] for row in unheard.rows()] == ["6"]


def test_brokers_that_never_say_how_a_transaction_ended_are_named(
    unheard: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined(unheard, monkeypatch)
    monkeypatch.setattr(Unheard, "commits", False)
    monkeypatch.setattr(Unheard, "times", 100)
    with pytest.raises(ConnectionFailed, match="it does not say"):
        unheard.unit(100, 200, unheard.put("1", "a", "1.00"))
    assert keys(unheard) == []


def test_a_transaction_that_times_out_leaves_nothing_and_is_written_again(
    begun: Begun, store: KafkaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers abort it while its writer is halted: consumers continue, and the second attempt commits the unit."""
    part = stream(begun, transaction_timeout=2.0)
    part.unit(100, 200)
    flush, held = transactions.Writer._flush, []

    def slow_once(self: transactions.Writer, client: Any) -> None:
        flush(self, client)
        if not held:
            held.append(await_condition(lambda: _stable(store, store.topic(TARGET)), 60))

    monkeypatch.setattr(transactions.Writer, "_flush", slow_once)
    assert part.unit(200, 300, begun.put("1", "a", "1.00"))
    assert held == [True]
    assert [key for key in keys(begun) if key] == [1]
    assert [key for key in keys(begun, committed=False) if key] == [1, 1]


def _stable(store: KafkaStore, topic: str) -> bool:
    """Return whether consumers of committed messages reach the end of a topic, because no transaction is open in it."""
    key = uuid.uuid4().bytes
    marker = Producer(store.cluster.conf())
    marker.produce(topic, b'{"id":0}', key, 0)
    marker.flush(10)
    return any(message.key == key for message in consumed(store.cluster, topic))


def test_a_unit_that_never_is_in_time_says_so(begun: Begun, store: KafkaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    part = stream(begun, transaction_timeout=1.0)
    flush = transactions.Writer._flush

    def slow(self: transactions.Writer, client: Any) -> None:
        flush(self, client)
        assert await_condition(lambda: _stable(store, store.topic(TARGET)), 60)

    monkeypatch.setattr(transactions.Writer, "_flush", slow)
    with pytest.raises(LimitExceeded) as told:
        part.unit(100, 200, begun.put("1", "a", "1.00"))
    assert "transaction_timeout" in told.value.solution
    assert begun.record.applied == 100


def test_a_message_that_the_brokers_do_not_take_is_named(begun: Begun) -> None:
    part = stream(begun)
    with pytest.raises(LimitExceeded) as told:
        part.unit(100, 200, begun.put("1", "x" * 1_500_000, "1.00"))
    assert "max.message.bytes" in told.value.solution
    assert keys(begun) == []
    assert begun.record.applied == 100
    assert part.unit(100, 200, begun.put("1", "x", "1.00"))


def test_a_failed_commit_holds_up_no_consumer(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    part = stream(begun)
    part.unit(100, 200, begun.put("1", "a", "1.00"))
    monkeypatch.setenv(VARIABLE, "before-transaction-end:error")
    with pytest.raises(Failpoint):
        part.unit(200, 300, begun.put("2", "b", "2.00"))
    monkeypatch.delenv(VARIABLE)
    assert begun.record.applied == 200
    assert _stable(begun.store, begun.store.topic(TARGET))  # type: ignore[arg-type, attr-defined]
    assert part.unit(200, 300, begun.put("2", "b", "2.00"))
    assert [key for key in keys(begun) if key] == [1, 2]
    assert [key for key in keys(begun, committed=False) if key] == [1, 2, 2]


@pytest.mark.parametrize("mode", ["stop", "kill"])
def test_a_broker_that_comes_back_finds_all_as_it_was(begun: Begun, kafka: KafkaServer, mode: Any) -> None:
    part = stream(begun)
    part.unit(100, 200, begun.put("1", "a", "1.00"))
    piece = part.piece(begun.put("2", "b", "2.00"))
    kafka.restart(mode)
    assert part.sink.commit(part.epoch, 200, 300, [piece])
    assert keys(begun) == [1, 2]
    assert begun.record.applied == 300


def test_a_record_that_has_lost_messages_is_refused(begun: Begun, store: KafkaStore) -> None:
    journal = begun.sink.journal  # type: ignore[attr-defined]
    begun.sink.record_source(begun.epoch, {"timeline": 3})
    producer = Producer(store.cluster.conf())
    producer.produce(journal.topic, None, json.dumps(["head", "applied"], separators=(",", ":")).encode(), 0)
    producer.flush(30)
    with pytest.raises(GateClosed, match="is incomplete"):
        begun.sink.record()


def test_brokers_that_are_not_there_are_named(store: KafkaStore) -> None:
    away = KafkaSink(replace(store.settings, brokers="127.0.0.1:9"), "p")
    with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:9"):
        away.record()


def test_properties_that_the_client_does_not_know_are_refused(store: KafkaStore) -> None:
    wrong = KafkaSink(replace(store.settings, properties=(("no.such.thing", "1"),)), "p")
    with pytest.raises(ConfigError, match=r"no\.such\.thing"):
        wrong.record()


def test_a_timeout_that_the_brokers_do_not_take_is_named_before_anything_is_made(store: KafkaStore) -> None:
    sink = KafkaSink(replace(store.settings, transaction_timeout=901.0), "p")
    with pytest.raises(ConfigError, match=TIMEOUTS):
        sink.prepare([TARGET], [WHOLE], IDENTITY, 100)
    assert store.names() == set()


def test_a_timeout_that_the_brokers_do_not_take_any_more_is_named(begun: Begun) -> None:
    part, record = stream(begun, transaction_timeout=901.0), begun.record
    for step in (
        lambda: part.sink.take_epoch("another"),
        lambda: part.unit(100, 200, begun.put("1", "a", "1.00")),
    ):
        with pytest.raises(ConfigError, match=TIMEOUTS):
            step()
    assert (begun.record, keys(begun)) == (record, [])


@pytest.mark.lengthy
def test_who_may_not_is_told_so_and_a_password_is_not_shown(server_directory: Path) -> None:
    login = Login("cdc", "pass-word")
    with make_broker(server_directory / "kafka-acl", login=login) as server:
        properties = (
            ("security.protocol", "SASL_PLAINTEXT"),
            ("sasl.mechanism", "PLAIN"),
            ("sasl.username", login.user),
            ("sasl.password", login.password),
        )
        settings = replace(KafkaStore(server.login_brokers).settings, properties=properties)
        with pytest.raises(MissingPrivilege) as told:
            KafkaSink(settings, "p").prepare([TARGET], [WHOLE], {}, 100)
        assert login.password not in repr(settings) + told.value.message
        assert settings.secrets == (login.password,)
