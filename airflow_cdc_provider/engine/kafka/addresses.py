"""Reads the address of a Kafka cluster from a pipeline file: brokers or an Airflow connection, and client properties.

Properties have the names that librdkafka uses. Except for logins and certificates, Java uses the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section import Section
from airflow_cdc_provider.engine.core.section_values import as_text

Properties: TypeAlias = tuple[tuple[str, str], ...]

_SECRET = re.compile(r"password|passphrase|secret|\.pem$|token|jaas", re.IGNORECASE)
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@\[\]]+)(:\d{1,5})?")
_REGISTRY_LOGINS = frozenset({"basic.auth.user.info", "bearer.auth.token"})
# Keys that Airflow's Kafka provider puts into a connection for its own purposes.
_NOT_OURS = ("group.id", "topics")


def brokers_of(section: Section, reserved: Sequence[str]) -> tuple[str, Properties]:
    """Return the brokers (``brokers`` or ``conn_id``) and the client ``properties`` of a section.

    :param reserved: names of properties that the engine sets itself. They are ignored in a connection, which may be
        shared with other users.
    :raises ConfigError: naming the key's path and what would be right; values may be secrets and are not shown.
    """
    found = section.connection("brokers", "Kafka", address_of)
    brokers, connected = found or (section.take("brokers", as_brokers, "", secret=True), ())
    own = dict(section.texts("properties", secret=True))
    if taken := sorted(own.keys() & set(reserved)):
        raise ConfigError(
            f"{section.path}.properties: {', '.join(taken)} cannot be set because the engine sets it",
            f"Remove it. Put the brokers' addresses into `{section.path}.brokers`, and the duration of a sink's"
            " transactions into `sink.transaction_timeout`. Offsets are kept in the sink's commit record, not in a"
            " consumer group, and only committed messages are read.",
        )
    given = {**dict(connected), **own}
    return brokers, tuple((name, value) for name, value in given.items() if name not in reserved)


def secrets_of(properties: Properties) -> tuple[str, ...]:
    """Return the values of properties that must not appear in logs."""
    return tuple(value for name, value in properties if value and (_SECRET.search(name) or name.endswith("user.info")))


def readable_logins(
    role: str, properties: Properties, registry: str | None, registry_properties: Properties
) -> list[str]:
    """Return a sentence for each server whose login would cross the network unencrypted.

    :param role: source or sink.
    """
    given = dict(properties)
    mechanism = given.get("sasl.mechanism", given.get("sasl.mechanisms", "")).upper()
    servers = []
    if mechanism == "PLAIN" and given.get("security.protocol", "").upper() == "SASL_PLAINTEXT":
        servers.append("the brokers (security.protocol is SASL_PLAINTEXT)")
    if _REGISTRY_LOGINS & dict(registry_properties).keys():
        urls = [url.strip() for url in (registry or "").split(",")]
        servers += [f"the schema registry {url}" for url in urls if url.lower().startswith("http://")]
    return [f"{role}: the login for {server} is not encrypted and can be read on the network." for server in servers]


def as_brokers(value: object) -> str:
    """Return addresses of brokers, separated by commas."""
    text = as_text(value).replace(" ", "")
    if not all(_ADDRESS.fullmatch(each) for each in text.split(",")):
        raise ValueError("brokers as host:port, separated by commas; put user and password into `properties`")
    return text


def as_registry(value: object) -> str:
    """Return the URL of a schema registry; several are separated by commas."""
    text = as_text(value)
    wanted = "http:// or https:// and a host; put user and password into `registry_properties` as basic.auth.user.info"
    for url in text.split(","):
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError(wanted) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(wanted)
    return text


def address_of(connection: str) -> tuple[str, Properties]:
    """Return brokers and properties of an Airflow connection of type Kafka, or of any type with a host.

    Its extras are properties of the client, including ``bootstrap.servers``, as in Airflow's Kafka provider.

    :param connection: as URI or JSON.
    :raises ValueError: saying what would be right; its text contains nothing of the connection.
    """
    wanted = "a connection with bootstrap.servers in its extra, or with host and port"
    try:
        parts = json.loads(connection) if connection.lstrip().startswith("{") else _uri_parts(connection)
        extra = parts.get("extra") or {}
        extra = json.loads(extra) if isinstance(extra, str) else extra
        properties = {name: _property(value) for name, value in extra.items() if name not in _NOT_OURS}
    except (json.JSONDecodeError, AttributeError):
        raise ValueError(wanted) from None
    port = f":{parts['port']}" if parts.get("port") else ""
    brokers = properties.pop("bootstrap.servers", None) or f"{parts.get('host') or ''}{port}"
    if parts.get("login"):
        properties.setdefault("sasl.username", str(parts["login"]))
    if parts.get("password"):
        properties.setdefault("sasl.password", str(parts["password"]))
    try:
        return as_brokers(brokers), tuple(properties.items())
    except ValueError:
        raise ValueError(wanted) from None


def java_properties(properties: Properties) -> Mapping[str, str]:
    """Return a client's properties under Java's names: a login becomes the single line that JAAS reads.

    Certificates and keys are converted too, see :func:`require_for_java`.
    """
    given = dict(properties)
    found = {name: value for name, value in given.items() if name not in _LIBRDKAFKA}
    mechanism = given.get("sasl.mechanism", given.get("sasl.mechanisms"))
    if mechanism is not None:
        found["sasl.mechanism"] = mechanism
    if "sasl.username" in given and "sasl.jaas.config" not in given:
        module = "plain.PlainLoginModule" if mechanism in (None, "PLAIN") else "scram.ScramLoginModule"
        login = {"username": given["sasl.username"], "password": given.get("sasl.password", "")}
        options = " ".join(f'{name}="{_escaped(value)}"' for name, value in login.items())
        found["sasl.jaas.config"] = f"org.apache.kafka.common.security.{module} required {options};"
    if "message.max.bytes" in given:
        found["max.request.size"] = given["message.max.bytes"]
    for name, (java, beside) in _CERTIFICATES.items():
        if name in given:
            found |= {java: given[name], **beside}
    return found


_TRUST, _KEYS = {"ssl.truststore.type": "PEM"}, {"ssl.keystore.type": "PEM"}
_CERTIFICATES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ssl.ca.location": ("ssl.truststore.location", _TRUST),
    "ssl.ca.pem": ("ssl.truststore.certificates", _TRUST),
    "ssl.key.pem": ("ssl.keystore.key", _KEYS),
    "ssl.certificate.pem": ("ssl.keystore.certificate.chain", _KEYS),
    "ssl.key.password": ("ssl.key.password", {}),
    "ssl.keystore.location": ("ssl.keystore.location", {"ssl.keystore.type": "PKCS12"}),
    "ssl.keystore.password": ("ssl.keystore.password", {}),
}
"""Java's names for certificates and keys, which librdkafka reads as PEM (keystores: PKCS#12), and further properties
that Java needs with them.
"""
_FILES = ("ssl.key.location", "ssl.certificate.location", "ssl.certificate.and.key.location")
_LIBRDKAFKA = ("sasl.mechanisms", "sasl.username", "sasl.password", "message.max.bytes", *_CERTIFICATES)


def require_for_java(properties: Properties) -> None:
    """Refuse properties that have no counterpart in Java.

    :raises ConfigError: naming the property.
    """
    found = next((name for name, _ in properties if name in _FILES), None)
    if found is not None:
        raise ConfigError(
            f"source.properties: {found} names a file that Kafka's Java client cannot read",
            "Give key and certificate as texts in ssl.key.pem and ssl.certificate.pem; or both in one PKCS#12 file in"
            " ssl.keystore.location with ssl.keystore.password.",
        )


def _escaped(text: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", text)


def _uri_parts(uri: str) -> dict[str, Any]:
    parts = urlsplit(uri)
    extra: dict[str, Any] = dict(parse_qsl(parts.query))
    if "__extra__" in extra:
        extra = json.loads(extra["__extra__"])
    names = {"login": parts.username, "password": parts.password, "host": parts.hostname}
    decoded = {name: unquote(value) for name, value in names.items() if value}
    return {**decoded, "port": parts.port, "extra": extra}


def _property(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
