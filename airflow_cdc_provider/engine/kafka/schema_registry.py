"""A client for schema registries with Confluent's API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import fastavro
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_cdc_provider.engine.core.errors import (
    CannotFollow,
    CdcError,
    ConfigError,
    ConnectionFailed,
    MissingPrivilege,
)

_CONFLICT, _UNAUTHORIZED = 409, (401, 403)


@dataclass(frozen=True)
class Registry:
    """A schema registry with Confluent's API.

    :param properties: properties of its client.
    """

    url: str
    properties: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def id_of(self, subject: str, schema: str) -> int:
        """Return the id of a schema, which is registered if it is missing.

        :raises CannotFollow: when the registry finds the schema incompatible with earlier ones.
        """
        return _id_of(os.getpid(), self, subject, schema)

    def schema(self, number: int) -> Any:
        """Return a schema by its id, as parsed by fastavro."""
        return _schema(os.getpid(), self, number)

    def check(self) -> None:
        """Require that the registry answers."""
        self.ask("cannot list its subjects", lambda client: client.get_subjects())

    def ask(self, what: str, ask: Callable[[SchemaRegistryClient], Any]) -> Any:
        """Send a request to the registry.

        :param what: what failed, for the message.
        """
        try:
            return ask(_client(os.getpid(), self))
        except SchemaRegistryError as e:
            raise self._failure(e, what) from e
        except Exception as e:
            # The client uses different HTTP libraries, depending on its version.
            if not isinstance(e, OSError) and not type(e).__module__.startswith("httpx"):
                raise
            raise ConnectionFailed(
                f"schema registry {self.url}: {what}: {e}", "Check that it runs and can be reached from here."
            ) from e

    def _failure(self, error: SchemaRegistryError, what: str) -> CdcError:
        said = f"schema registry {self.url}: {what}: {error.error_message} ({error.http_status_code})"
        if error.http_status_code == _CONFLICT:
            return CannotFollow(
                said,
                "Make the schema change compatible, or relax the compatibility setting of the subject; then"
                " start again.",
            )
        if error.http_status_code in _UNAUTHORIZED:
            return MissingPrivilege(said, "Set a user that may register schemas in `sink.registry_properties`.")
        return ConnectionFailed(said, "Check the registry's log; then start again.")


@cache
def _client(pid: int, registry: Registry) -> SchemaRegistryClient:
    try:
        return SchemaRegistryClient({**dict(registry.properties), "url": registry.url})
    except (ValueError, TypeError) as e:
        raise ConfigError(f"schema registry {registry.url}: {e}", "Correct `registry_properties`.") from e


@cache
def _id_of(pid: int, registry: Registry, subject: str, schema: str) -> int:
    found = registry.ask(
        f"cannot register the schema of {subject}",
        lambda client: client.register_schema(subject, Schema(schema, "AVRO")),
    )
    return int(found)


@cache
def _schema(pid: int, registry: Registry, number: int) -> Any:
    found = registry.ask(f"cannot get schema {number}", lambda client: client.get_schema(number))
    return fastavro.parse_schema(without_logical_types(json.loads(found.schema_str)))


def without_logical_types(schema: Any) -> Any:
    """Return an Avro schema without logical types, for values as they are encoded."""
    if isinstance(schema, list):
        return [without_logical_types(each) for each in schema]
    if isinstance(schema, dict):
        return {name: without_logical_types(each) for name, each in schema.items() if name != "logicalType"}
    return schema
