"""Users of the Kafka under test."""

from __future__ import annotations

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from local_servers.kafka import KafkaServer, Login
from tests.support.kafka_server import SECONDS

USER = Login("cdc", r"""it's "\u00e9\n" ;=#é""")


def grant(server: KafkaServer, kind: ResourceType, name: str, operation: AclOperation) -> None:
    """Grant the user an operation."""
    allowed = AclBinding(
        kind, name, ResourcePatternType.LITERAL, f"User:{USER.user}", "*", operation, AclPermissionType.ALLOW
    )
    client = AdminClient({"bootstrap.servers": server.brokers})
    client.create_acls([allowed])[allowed].result(SECONDS)
