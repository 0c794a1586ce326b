"""Any error of Kafka's client, with any code and at any step of the sink, is reported with a remedy."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.kafka import cluster
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.sinks.kafka import staging_topic, transactions
from local_servers.kafka import KafkaServer
from tests.sinks.begun_sink import TARGET, begin
from tests.support.kafka_server import clear
from tests.support.kafka_sink import KafkaStore
from tests.support.refusals import steps

UNKNOWN = 12_345
ENDING = ("prepare", "restart", "forget", "take_epoch", "drop")
"""Steps that leave earlier steps nothing to do, and therefore come last."""
CODES = sorted({code for code in vars(KafkaError).values() if isinstance(code, int)} - {KafkaError.NO_ERROR})
CALLS = {
    AdminClient: (cluster,),
    Consumer: (cluster,),
    Producer: (staging_topic, transactions),
}


@pytest.mark.parametrize("section", ["source", "sink"])
def test_every_code_becomes_an_error_with_a_solution(section: str) -> None:
    for code in [*CODES, UNKNOWN]:
        error = Cluster("one:9092", section=section).failure(KafkaError(code), "it fails")
        assert error.solution
        assert KafkaError(code).name() in error.message


class Trouble:
    """Lets one call of a client fail on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self.met = ""
        # Clients that this process has kept from earlier tests would not fail.
        monkeypatch.setattr(cluster, "_admins", {})
        monkeypatch.setattr(cluster, "_consumers", defaultdict(list))
        monkeypatch.setattr(staging_topic, "_producers", {})
        for kind, modules in CALLS.items():
            for module in modules:
                monkeypatch.setattr(module, kind.__name__, self._failing(kind))

    def _failing(self, kind: type) -> type:
        """Return a client that behaves as usual, except for the call that fails."""
        trouble = self

        def call(name: str) -> Callable[..., Any]:
            def called(client: Any, *arguments: Any, **named: Any) -> Any:
                trouble._pass(f"{kind.__name__}.{name}")
                return getattr(super(made, client), name)(*arguments, **named)

            return called

        public = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
        made = type(kind.__name__, (kind,), {name: call(name) for name in public - {"close", "poll"}})
        return made

    def _pass(self, name: str) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == -1:
                self.met = name
                raise KafkaException(KafkaError(UNKNOWN, "on purpose"))

    def begin(self, after: int) -> None:
        """Let one call fail, after some that do not."""
        self._left, self.met = after, ""

    def end(self) -> None:
        """Let no call fail."""
        self._left = None


@pytest.fixture
def store(kafka: KafkaServer) -> Iterator[KafkaStore]:
    made = KafkaStore(kafka.brokers, partitions=1)
    yield made
    clear(made.cluster)


def test_no_error_of_the_client_leaves_the_sink(store: KafkaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = Trouble(monkeypatch)
    begun = begin(store, "changelog")
    tried = steps(begun) | {"rows": lambda: list(begun.sink.rows(TARGET))}
    for step in sorted(tried, key=lambda name: ENDING.index(name) if name in ENDING else -1):
        attempt = tried[step]
        for after in itertools.count():
            trouble.begin(after)
            refused = None
            try:
                attempt()
            except CdcError as e:
                refused = e
            finally:
                trouble.end()
            # If the outcome of a transaction is unknown, it is looked up; a transaction that was aborted is repeated.
            assert refused is not None or trouble.met in ("", "Producer.commit_transaction"), (step, trouble.met)
            assert refused is None or refused.solution, (step, trouble.met)
            if not trouble.met:
                assert after, step
                break
        assert step != "commit" or begun.record.applied == 200
