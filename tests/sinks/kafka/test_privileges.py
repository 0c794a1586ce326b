"""A user with only the ACLs that docs/sinks/kafka.md lists: they are sufficient, and each of them is necessary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import MissingPrivilege
from local_servers.kafka import KafkaServer, Login
from tests.conftest import Databases
from tests.support.kafka_pipeline import KafkaPipeline
from tests.support.kafka_server import SECONDS, clear, make_broker

pytestmark = pytest.mark.slow

USER = Login("cdc", "pass-word")
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED


class Acl(NamedTuple):
    """An operation that the user may perform.

    :param name: name of the resource, with ``{}`` for the pipeline's name.
    """

    kind: ResourceType
    name: str
    operation: AclOperation
    pattern: ResourcePatternType = LITERAL

    def __str__(self) -> str:
        return f"{self.operation.name} {self.kind.name} {self.name}"

    def binding(self, pipeline: str) -> AclBinding:
        """Return the ACL in the form for brokers."""
        name = self.name.format(pipeline)
        user = f"User:{USER.user}"
        return AclBinding(self.kind, name, self.pattern, user, "*", self.operation, AclPermissionType.ALLOW)


CREATE, READ, WRITE, DELETE = AclOperation.CREATE, AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE
RECORD, STAGING = "airflow_cdc.{}", "airflow_cdc.{}.staging"
DESCRIBE_CONFIGS = AclOperation.DESCRIBE_CONFIGS
TABLES = [Acl(ResourceType.TOPIC, "{}.", each, PREFIXED) for each in (CREATE, READ, WRITE)]
POLICIES = Acl(ResourceType.TOPIC, "{}.", DESCRIBE_CONFIGS, PREFIXED)
SETTINGS = Acl(ResourceType.TOPIC, RECORD, DESCRIBE_CONFIGS)
OWN = [Acl(ResourceType.TOPIC, name, each) for name in (RECORD, STAGING) for each in (CREATE, READ, WRITE, DELETE)]
TRANSACTIONS = Acl(ResourceType.TRANSACTIONAL_ID, RECORD, WRITE, PREFIXED)
GROUP = Acl(ResourceType.GROUP, "airflow_cdc", AclOperation.DESCRIBE)
CONFIGS = Acl(ResourceType.BROKER, "kafka-cluster", DESCRIBE_CONFIGS)
LISTED = [*TABLES, POLICIES, *OWN, SETTINGS, TRANSACTIONS, GROUP, CONFIGS]

Grant = Callable[[Iterable[Acl]], None]


@pytest.fixture(scope="module")
def server(server_directory: Path) -> Iterator[KafkaServer]:
    """Return a broker at which the user has to log in."""
    with make_broker(server_directory / "kafka-privileges", login=USER) as made:
        yield made


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path, server: KafkaServer) -> Iterator[KafkaPipeline]:
    made = KafkaPipeline(tmp_path, databases, ["public.t"], server.brokers)
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    # Clients with the same properties are reused, including what they have learned.
    login |= {"sasl.username": USER.user, "sasl.password": USER.password, "client.id": made.name}
    made.change(sink={"brokers": server.login_brokers, "properties": login})
    made.source("CREATE TABLE public.t (id int PRIMARY KEY, a text)", "INSERT INTO public.t VALUES (1, 'x'), (2, 'y')")
    yield made
    clear(made.cluster)


@pytest.fixture
def grant(server: KafkaServer, pipeline: KafkaPipeline) -> Iterator[Grant]:
    """Grant the user an ACL for the duration of a test."""
    client = AdminClient({"bootstrap.servers": server.brokers})

    def grant(acls: Iterable[Acl]) -> None:
        for made in client.create_acls([acl.binding(pipeline.name) for acl in acls]).values():
            made.result(SECONDS)

    yield grant
    kinds = (ResourceType.ANY, None, ResourcePatternType.ANY)
    of_all = AclBindingFilter(*kinds, None, None, AclOperation.ANY, AclPermissionType.ANY)  # type: ignore[arg-type]
    client.delete_acls([of_all])[of_all].result(SECONDS)


def live(pipeline: KafkaPipeline) -> None:
    """Run through the whole life of a pipeline."""
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET a = 'z' WHERE id = 1", "DELETE FROM public.t WHERE id = 2")
    pipeline.apply()
    pipeline.assert_verified()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    pipeline.assert_verified()
    commands.drop(pipeline.pipeline)


@pytest.mark.thorough
def test_what_is_listed_is_enough(pipeline: KafkaPipeline, grant: Grant) -> None:
    grant(LISTED)
    findings = preflight(pipeline.pipeline)
    assert all(finding.ok for finding in findings), findings
    live(pipeline)


@pytest.mark.parametrize("acl", [acl for acl in LISTED if acl != POLICIES], ids=str)
def test_what_is_not_granted_is_named(pipeline: KafkaPipeline, grant: Grant, acl: Acl) -> None:
    grant(other for other in LISTED if other != acl)
    with pytest.raises(MissingPrivilege) as told:
        live(pipeline)
    if acl in (GROUP, CONFIGS):
        assert f"{acl.kind.name}_AUTHORIZATION_FAILED".replace("BROKER", "CLUSTER") in told.value.message
    elif acl == TRANSACTIONS:
        assert f"transactions under {RECORD.format(pipeline.name)}" in told.value.message
    else:
        name = pipeline.topic() if acl in TABLES else acl.name.format(pipeline.name)
        assert re.search(rf"topics? ([\w.-]+, )*{re.escape(name)}(?![\w.-])", told.value.message), told.value.message
    assert "Privileges" in told.value.solution


def test_rows_that_may_not_be_staged_are_told_of_again(pipeline: KafkaPipeline, grant: Grant) -> None:
    """By then the client knows that it may not write, and refuses messages before it sends them."""
    grant(acl for acl in LISTED if acl[1:3] != (STAGING, WRITE))
    pipeline.provision()
    for _ in range(2):
        with pytest.raises(MissingPrivilege, match="staging"):
            pipeline.copy()


@pytest.mark.parametrize(
    ("acl", "check"), [(TABLES[1], "topics"), (TRANSACTIONS, "transactions"), (CONFIGS, "transaction timeout")], ids=str
)
def test_a_preflight_finds_what_is_not_granted(pipeline: KafkaPipeline, grant: Grant, acl: Acl, check: str) -> None:
    left_out = [other for other in LISTED if other[:2] == acl[:2]]
    grant(other for other in LISTED if other not in left_out)
    failed = {finding.check: type(finding.error) for finding in preflight(pipeline.pipeline) if not finding.ok}
    assert check in failed
    assert set(failed.values()) == {MissingPrivilege}


def test_a_preflight_asks_for_the_policies_of_topics_that_are_there(pipeline: KafkaPipeline, grant: Grant) -> None:
    grant(acl for acl in LISTED if acl != POLICIES)
    pipeline.cluster.create([pipeline.topic()], 1, -1, {})
    (found,) = [finding for finding in preflight(pipeline.pipeline) if not finding.ok]
    assert (found.check, type(found.error)) == ("cleanup policy", MissingPrivilege)
