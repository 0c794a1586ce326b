"""Translates errors of Kafka's client into errors of the engine."""

from __future__ import annotations

from airflow_cdc_provider.engine.core.errors import (
    CdcError,
    ConfigError,
    ConnectionFailed,
    LimitExceeded,
    MissingPrivilege,
    StreamFailed,
    TargetConflict,
)
from airflow_cdc_provider.engine.kafka.client import KafkaError

UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
LOGIN = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)
PASSING = (
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_LEADER_EPOCH,
)
OUT_OF_RANGE = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET)
# The client keeps retrying when replicas are missing, so in the end it may report only a timeout.
_NOT_TAKEN = (
    KafkaError._MSG_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)


def client_failure(error: KafkaError, brokers: str, section: str, what: str) -> CdcError:
    """Return an error of the client as an error of the engine.

    :param brokers: the brokers that were asked.
    :param section: the section of the pipeline file that names them, ``source`` or ``sink``.
    :param what: what failed, for the message.
    """
    code, said = error.code(), f"Kafka at {brokers}: {what}: {error.str()} ({error.name()})"
    if code in UNKNOWN:
        return StreamFailed(said, "Find out why the topic was removed; then start again.")
    if code in _FORBIDDEN:
        page = "the documentation of the Kafka sink" if section == "sink" else "the documentation of the Kafka source"
        return MissingPrivilege(said, f"Grant what {page} lists under Privileges.")
    if code in LOGIN:
        return ConnectionFailed(said, f"Give a valid user and password in `{section}.properties` or in the connection.")
    if code in _TOO_LARGE:
        return LimitExceeded(
            said,
            "Nothing of it was applied. Raise max.message.bytes of the topic (with `kafka-configs --alter`, and in"
            " `sink.topic_config` for topics to be created) and message.max.bytes of the client (`sink.properties`),"
            " or leave out the large column with `columns`.",
        )
    if code == KafkaError.INVALID_RECORD:
        return TargetConflict(
            f"{said}: a compacted topic rejects messages without a key, such as a TRUNCATE or the start of a re-read"
            " of a whole table",
            "Set the topic's cleanup.policy to delete with `kafka-configs --alter`, and start again. Once the message"
            " has been written, the topic can be compacted again.",
        )
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return ConfigError(
            f"{said}: sink.transaction_timeout is longer than the brokers' transaction.max.timeout.ms",
            "Lower `sink.transaction_timeout`, or raise transaction.max.timeout.ms of the brokers.",
        )
    if code in (KafkaError._INVALID_ARG, KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION):
        return ConfigError(
            said,
            f"Correct `{section}.properties`."
            if section == "source"
            else "Correct `sink.properties` or `sink.topic_config`.",
        )
    if code in (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.INVALID_PARTITIONS):
        return ConfigError(said, "Correct `sink.replicas` or `sink.partitions`.")
    if code in OUT_OF_RANGE:
        return StreamFailed(said, "Find out why unread messages were removed; then start again.")
    if code in _NOT_TAKEN:
        return ConnectionFailed(
            said,
            "Check that the brokers run, and that the topic has as many in-sync replicas as its min.insync.replicas"
            " requires; then start again.",
        )
    return ConnectionFailed(said, "Check that the brokers run and can be reached from here; then start again.")
