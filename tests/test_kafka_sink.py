"""The Kafka sink by itself, on a real broker: what it promises like every sink, and what consumers see of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_cdc_provider.demo.kafka import KafkaServer
from tests.kafka_sink import KafkaStore, clear
from tests.sink_contract import ChangelogContract, LakeContract, ProtocolContract


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
