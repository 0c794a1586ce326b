"""Temporary Kafka brokers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ResourceType,
)

from airflow_cdc_provider.engine.core.waiting import await_condition
from local_servers.kafka import KafkaServer
from local_servers.process import ServerError
from tests.support.kafka_server import SECONDS, committed, create_topic, make_broker, properties, transactional
from tests.support.kafka_users import USER, grant

pytestmark = pytest.mark.slow


def write(brokers: str, topic: str, *values: bytes) -> None:
    """Send messages in a transaction."""
    producer = transactional(brokers, "writer")
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.commit_transaction(SECONDS)


def values(brokers: str, topic: str, **conf: Any) -> list[bytes | None]:
    return [message.value for message in committed(brokers, topic, **conf)]


def awaited(brokers: str, topic: str, expected: list[bytes], **conf: Any) -> bool:
    """Return whether a topic gets exactly these values in time."""
    return await_condition(lambda: values(brokers, topic, **conf) == expected, SECONDS)


def test_a_transaction_is_seen_when_it_is_committed_and_not_when_it_is_aborted(kafka: KafkaServer) -> None:
    create_topic(kafka.brokers, "seen", partitions=2)
    producer = transactional(kafka.brokers, "seen")
    for value, finish in ((b"no", producer.abort_transaction), (b"yes", producer.commit_transaction)):
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce("seen", value, partition=partition)
        producer.flush(SECONDS)
        if value == b"yes":
            assert values(kafka.brokers, "seen") == []
        finish(SECONDS)

    assert awaited(kafka.brokers, "seen", [b"yes", b"yes"])
    assert values(kafka.brokers, "seen", isolation_level="read_uncommitted") == [b"no", b"yes"] * 2


def test_a_second_producer_of_the_same_name_fences_the_first(kafka: KafkaServer) -> None:
    create_topic(kafka.brokers, "fenced")
    first = transactional(kafka.brokers, "fenced")
    first.begin_transaction()
    first.produce("fenced", b"lost")
    first.flush(SECONDS)

    second = transactional(kafka.brokers, "fenced")

    with pytest.raises(KafkaException) as caught:
        first.commit_transaction(SECONDS)
    assert caught.value.args[0].code() == KafkaError._FENCED
    second.begin_transaction()
    second.produce("fenced", b"kept")
    second.commit_transaction(SECONDS)
    assert awaited(kafka.brokers, "fenced", [b"kept"])


def test_crash_and_restart_keep_port_and_data(kafka: KafkaServer) -> None:
    create_topic(kafka.brokers, "kept")
    write(kafka.brokers, "kept", b"1", b"2")
    before = kafka.brokers

    for mode in ("kill", "stop"):
        kafka.restart(mode)

        assert kafka.brokers == before
        assert awaited(before, "kept", [b"1", b"2"])
    write(before, "kept", b"3")
    assert awaited(before, "kept", [b"1", b"2", b"3"])


def test_a_topic_is_not_made_by_who_asks_for_it(kafka: KafkaServer) -> None:
    client = AdminClient({"bootstrap.servers": kafka.brokers})

    asked = client.list_topics("mistyped", SECONDS).topics["mistyped"]

    assert asked.error is not None
    assert asked.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert "mistyped" not in client.list_topics(timeout=SECONDS).topics


def test_access_settings_and_removal_of_a_server(server_directory: Path) -> None:
    with make_broker(server_directory / "own", {"transaction.max.timeout.ms": "70000"}, USER) as server:
        assert server._process is not None
        process = server._process.pid

        # Access.
        create_topic(server.brokers, "granted")
        write(server.brokers, "granted", b"1")
        assert refused(server, f"{USER.password} ")
        with pytest.raises(AssertionError, match="TOPIC_AUTHORIZATION_FAILED"):
            values(server.login_brokers, "granted", **as_user(USER.password))
        grant(server, ResourceType.TOPIC, "granted", AclOperation.READ)
        grant(server, ResourceType.GROUP, "tests", AclOperation.READ)
        assert awaited(server.login_brokers, "granted", [b"1"], **as_user(USER.password))

        # Its setting.
        with pytest.raises(KafkaException) as caught:
            transactional(server.brokers, "patient", transaction_timeout_ms="71000")
        assert caught.value.args[0].code() == KafkaError.INVALID_TRANSACTION_TIMEOUT

        # Its life.
        server.start()
        assert server._process.pid == process
        server.stop()
        assert not server.running
        assert not psutil.pid_exists(process)

        # A start that fails shows the log.
        with (
            socket.create_server(("127.0.0.1", server.port)),
            pytest.raises(ServerError, match="Address already in use"),
        ):
            server.start()
        assert not server.running

    assert not server.directory.exists()


def as_user(password: str) -> dict[str, Any]:
    """Return properties, with underscores for dots, of a client that logs in."""
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_username": USER.user,
        "sasl_password": password,
    }


def refused(server: KafkaServer, password: str) -> bool:
    """Return whether the user is refused with a password."""
    errors: list[KafkaError] = []
    client = AdminClient(properties(server.login_brokers, **as_user(password)) | {"error_cb": errors.append})

    def told() -> bool:
        client.poll(0.1)
        return KafkaError._AUTHENTICATION in [error.code() for error in errors]

    return await_condition(told, SECONDS)


def test_a_setting_that_is_wrong_is_named(server_directory: Path) -> None:
    with pytest.raises(ServerError, match=r"Invalid value many for configuration num\.io\.threads"):
        make_broker(server_directory / "wrong", {"num.io.threads": "many"})


def test_a_used_directory_is_refused(server_directory: Path) -> None:
    used = server_directory / "used-by-kafka"
    used.mkdir()
    (used / "precious").touch()

    with pytest.raises(ServerError, match="not empty"):
        KafkaServer.create(used)


def test_a_server_stops_when_its_owner_is_killed(server_directory: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from local_servers.kafka import KafkaServer
        server = KafkaServer.create(Path({str(server_directory / "kafka-orphan")!r}))
        server.start()
        print(server._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, check=False)

    assert done.returncode == -signal.SIGKILL
    assert await_condition(lambda: not psutil.pid_exists(int(done.stdout)), seconds=15)
