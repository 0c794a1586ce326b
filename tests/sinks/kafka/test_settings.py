"""The ``sink`` section for Kafka: the sources of brokers, users and secrets, and the names of topics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    MissingPrivilege,
    StreamFailed,
)
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.kafka.addresses import Properties, address_of, readable_logins
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.kafka.schema_registry import Registry
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sinks.kafka.settings import _RESERVED, KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.target_topics import TargetTopics
from tests.support.pipeline_files import document

ROOT = Path(__file__).parents[3]

LOGIN = (("security.protocol", "SASL_SSL"), ("sasl.username", "me"), ("sasl.password", "p@ss:word"))


def parse(sink: dict[str, Any], resolve: bool = True, **environment: str) -> KafkaSettings:
    section = Section("sink", sink, environment, resolve)
    settings = KafkaSettings.parse(section)
    section.finish()
    return settings


@pytest.mark.parametrize(
    ("connection", "brokers", "properties"),
    [
        ("kafka://one:9092", "one:9092", ()),
        ("kafka://me:p%40ss%3Aword@one:9092?security.protocol=SASL_SSL", "one:9092", LOGIN),
        (
            json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": "a:1,b:2", **dict(LOGIN)}}),
            "a:1,b:2",
            LOGIN,
        ),
        (
            json.dumps({"extra": json.dumps({"bootstrap.servers": "a:1", "group.id": "g", "enable.ssl": True})}),
            "a:1",
            (("enable.ssl", "true"),),
        ),
        ("kafka://?__extra__=%7B%22bootstrap.servers%22%3A%20%22a%3A1%22%7D", "a:1", ()),
        ("kafka://one:9092?transactional.id=mine&isolation.level=read_uncommitted", "one:9092", ()),
    ],
)
def test_an_airflow_connection_names_brokers_and_properties(
    connection: str, brokers: str, properties: tuple[tuple[str, str], ...]
) -> None:
    settings = parse({"conn_id": "events"}, AIRFLOW_CONN_EVENTS=connection)
    assert settings.brokers == brokers
    assert dict(settings.properties) == dict(properties)
    assert "p@ss" not in repr(settings)


@pytest.mark.parametrize("connection", ["kafka://", "{", '{"extra": "no json"}', "postgresql://u:secret@/db"])
def test_a_connection_without_brokers_is_refused_and_not_shown(connection: str) -> None:
    with pytest.raises(ConfigError, match="not a Kafka connection") as told:
        parse({"conn_id": "events"}, AIRFLOW_CONN_EVENTS=connection)
    assert "secret" not in told.value.message + told.value.solution
    with pytest.raises(ValueError, match="bootstrap"):
        address_of(connection)


def test_properties_of_the_file_win_and_take_variables() -> None:
    sink = {"conn_id": "events", "properties": {"sasl.password": "${PASSWORD}", "socket.keepalive.enable": True}}
    settings = parse(sink, AIRFLOW_CONN_EVENTS="kafka://me:old@one:9092", PASSWORD="new")
    assert dict(settings.properties) == {
        "sasl.username": "me",
        "sasl.password": "new",
        "socket.keepalive.enable": "true",
    }
    assert settings.secrets == ("new",)
    with pytest.raises(ConfigError, match="PASSWORD") as told:
        parse({"brokers": "one:9092", "properties": {"sasl.password": "${PASSWORD}"}})
    assert "not set" in told.value.message


def test_what_the_engine_decides_is_refused_and_the_documentation_says_so() -> None:
    told = (ROOT / "docs" / "sinks" / "kafka.md").read_text(encoding="utf-8")
    for name in _RESERVED:
        assert f"`{name}`" in told
        with pytest.raises(ConfigError, match=f"sink.properties: {name} cannot be set") as refused:
            parse({"brokers": "one:9092", "properties": {name: "x"}})
        assert "sink.transaction_timeout" in refused.value.solution


def test_the_passphrase_of_a_key_is_a_secret() -> None:
    name = "sasl.oauthbearer.assertion.private.key.passphrase"
    settings = parse({"brokers": "one:9092", "properties": {name: "open-it", "client.id": "me"}})
    assert settings.secrets == ("open-it",)


def test_secrets_of_the_registry_are_secrets() -> None:
    sink = {"brokers": "one:9092", "format": "avro", "registry": "http://r"}
    settings = parse({**sink, "registry_properties": {"basic.auth.user.info": "me:secret", "ssl.ca.location": "/ca"}})
    assert settings.secrets == ("me:secret",)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    "url",
    [
        "registry:8081",
        "http://me:secret@registry:8081",
        "http://a,http://me:secret@b",
        "http://[b",
        "ftp://registry",
        "http://",
    ],
)
def test_a_registry_is_a_url_without_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sink\.registry") as told:
        parse({"brokers": "one:9092", "format": "avro", "registry": url})
    assert "secret" not in told.value.message + told.value.solution


PLAIN = (("sasl.mechanism", "PLAIN"), ("sasl.password", "secret"))
BASIC = (("basic.auth.user.info", "me:secret"),)


@pytest.mark.parametrize(
    ("properties", "registry", "registry_properties", "named"),
    [
        ((("security.protocol", "sasl_plaintext"), *PLAIN), None, (), ["the brokers"]),
        ((("security.protocol", "SASL_SSL"), *PLAIN), None, (), []),
        ((("security.protocol", "SASL_PLAINTEXT"), ("sasl.mechanisms", "SCRAM-SHA-256")), None, (), []),
        ((), "http://one, https://two, HTTP://three", BASIC, ["http://one", "HTTP://three"]),
        ((), "http://one", (("ssl.key.password", "secret"),), []),
        ((), "https://two", BASIC, []),
        ((), "http://one", (), []),
    ],
)
def test_a_login_that_the_network_can_read_is_told(
    properties: Properties, registry: str | None, registry_properties: Properties, named: list[str]
) -> None:
    found = readable_logins("sink", properties, registry, registry_properties)
    assert len(found) == len(named)
    assert all(name in warning for name, warning in zip(named, found, strict=True))


def test_properties_that_the_client_of_the_registry_does_not_know_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.thing"):
        Registry("http://127.0.0.1:1", (("no.such.thing", "x"),)).check()


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (KafkaError.NOT_ENOUGH_REPLICAS, ConnectionFailed, "min.insync.replicas"),
        (KafkaError._AUTO_OFFSET_RESET, StreamFailed, "unread messages"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, MissingPrivilege, "Privileges"),
        (KafkaError.POLICY_VIOLATION, ConfigError, "sink.topic_config"),
        (KafkaError._TRANSPORT, ConnectionFailed, "brokers run"),
    ],
)
def test_what_the_client_says_becomes_an_error_with_a_solution(code: int, kind: type[CdcError], said: str) -> None:
    error = Cluster("one:9092").failure(KafkaError(code), "it fails")
    assert type(error) is kind
    assert said in error.solution


def test_a_file_that_is_not_resolved_names_no_brokers() -> None:
    assert parse({"conn_id": "events"}, resolve=False).brokers == ""
    assert parse({"brokers": "${BROKERS}"}, resolve=False).brokers == "${BROKERS}"
    with pytest.raises(ConfigError, match=r"sink\.brokers is missing"):
        parse({})


def test_messages_name_the_source_s_database_unless_the_file_names_another() -> None:
    for format_, given, expected in (("debezium", None, "shop"), ("debezium", "other", "other"), ("json", None, "")):
        database = {} if given is None else {"database": given}
        sink = {"type": "kafka", "brokers": "one:9092", "format": format_, **database}
        (settings,) = Pipeline.parse(document(sink=sink)).sinks
        assert isinstance(settings, KafkaSettings)
        assert settings.database == expected


def test_a_single_table_may_have_a_topic_of_any_name() -> None:
    settings = parse({"brokers": "one:9092", "topic": "orders"})
    assert settings.topic_of("shop", "public", "orders") == "orders"
    topics = TargetTopics(settings, "shop")
    topics.require_apart([target("a")])
    with pytest.raises(ConfigError, match="would share the topic orders"):
        topics.require_apart([target("a"), target("b")])


def target(name: str) -> Target:
    return Target(Table(1, "public", name, (), ("id",), "d", None, (), "r", 0), "public", name)


def test_topics_have_names_that_kafka_takes() -> None:
    settings = parse({"brokers": "one:9092"})
    assert settings.topic_of("shop", "public", "Ord ers/ü") == "shop.public.Ord_ers__"
    assert settings.dataset("shop", "public", "t") == ("kafka://one:9092", "shop.public.t")
    assert parse({"brokers": "b:1", "topic": "dbz.{schema}.{table}"}).topic_of("p", "s", "t") == "dbz.s.t"
