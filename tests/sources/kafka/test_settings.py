"""The source section for topics: its keys, the refusals, and that it shows no password."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.kafka.addresses import java_properties
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.kafka.checkpoint import Checkpoint
from airflow_cdc_provider.engine.sources.kafka.settings import _RESERVED, PACKAGE, topic_settings
from airflow_cdc_provider.engine.sources.postgres.settings import postgres_settings
from tests.support.pipeline_files import document

ROOT = Path(__file__).parents[3]

SOURCE: dict[str, Any] = {
    "type": "kafka",
    "brokers": "one:9092, two:9092",
    "topics": ["clicks"],
    "columns": "id STRING NOT NULL, at TIMESTAMP",
    "table": "public.sums",
}


def parse(environment: dict[str, str] | None = None, **changes: Any) -> Pipeline:
    """Return the pipeline with keys of its source changed; ``None`` removes one."""
    source = {name: value for name, value in {**SOURCE, **changes}.items() if value is not None}
    return Pipeline.parse(document(source=source), environment or {})


def test_defaults() -> None:
    pipeline = parse()
    topics = topic_settings(pipeline)
    assert (topics.brokers, topics.topics, topics.pattern) == ("one:9092,two:9092", ("clicks",), "")
    assert (topics.starting, topics.format, topics.late, topics.dead_letters) == ("earliest", "json", "drop", "")
    assert topics.schema_and_name == ("public", "sums")
    assert pipeline.source.captured == ("clicks",)
    assert PACKAGE in pipeline.spark_conf["spark.jars.packages"]


def test_the_package_comes_beside_those_of_sinks_and_file() -> None:
    source, sink = SOURCE, {"type": "delta", "path": "/lake"}
    conf = {"spark.jars.packages": "org:own:1"}
    pipeline = Pipeline.parse(document(source=source, sink=sink, spark={"conf": conf}))
    packages = pipeline.spark_conf["spark.jars.packages"].split(",")
    assert packages[0] == PACKAGE
    assert packages[-1] == "org:own:1"
    assert len(packages) == 3


def test_a_pipeline_over_topics_has_no_slot() -> None:
    with pytest.raises(ConfigError, match="no replication slot"):
        postgres_settings(parse())


def test_a_pattern_is_of_whole_names() -> None:
    topics = topic_settings(parse(topics=None, pattern="a|shop", bad_records={"dead_letter": "shop-dead"}))
    names = ("a", "shop", "shops", "my-shop", "__shop")
    assert [name for name in names if topics.reads(name)] == ["a", "shop"]
    assert topics.topic_options == {"subscribePattern": "^(?!__)(?:a|shop)$"}


def test_a_checkpoint_shares_its_folder_with_others_and_removes_nothing_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    checkpoint = Checkpoint.of(parse(checkpoint=str(tmp_path)))
    assert checkpoint.url == f"file://{tmp_path}/shop"
    checkpoint.require_own()
    checkpoint.remove()
    for name in ("metadata", ".metadata.crc", "offsets/0", "state/0/0/1.zip", "theirs/data"):
        (tmp_path / "shop" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shop" / name).touch()
    with pytest.raises(ConfigError, match="contains theirs"):
        checkpoint.require_own()
    checkpoint.remove()
    assert [each.name for each in (tmp_path / "shop").iterdir()] == ["theirs"]
    shutil.rmtree(tmp_path / "shop" / "theirs")
    checkpoint.require_own()
    checkpoint.remove()
    assert [each.name for each in tmp_path.iterdir()] == ["data"]


def test_passwords_go_to_java_and_are_shown_nowhere() -> None:
    given = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": "u"}
    pipeline = parse({"PW": 'p"\\w'}, properties={**given, "sasl.password": "${PW}", "ssl.ca.location": "/ca.pem"})
    topics = topic_settings(pipeline)
    assert topics.secrets == ('p"\\w',)
    assert 'p"' not in repr(pipeline)
    options = topics.client_options
    assert options["kafka.sasl.jaas.config"] == (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="p\\"\\\\w";'
    )
    assert options["kafka.ssl.truststore.location"] == "/ca.pem"
    assert not {"kafka.sasl.password", "kafka.sasl.username", "kafka.ssl.ca.location"} & options.keys()


def test_certificates_go_to_java() -> None:
    given = {"ssl.ca.pem": "ca", "ssl.key.pem": "key", "ssl.certificate.pem": "chain", "ssl.key.password": "pw"}
    pipeline = parse(properties=given)
    topics = topic_settings(pipeline)
    assert java_properties(topics.properties) == {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": "ca",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": "key",
        "ssl.keystore.certificate.chain": "chain",
        "ssl.key.password": "pw",
    }
    hidden = re.compile(pipeline.spark_conf["spark.redaction.regex"])
    assert all(hidden.search(f"kafka.{name}") for name in ("ssl.keystore.key", "ssl.key.password", "ssl.key.pem"))
    assert {"key", "pw"} <= set(topics.secrets)
    assert java_properties((("ssl.keystore.location", "/k"), ("ssl.keystore.password", "pw"))) == {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": "/k",
        "ssl.keystore.password": "pw",
    }
    with pytest.raises(ConfigError, match=r"ssl\.key\.location"):
        parse(properties={"ssl.key.location": "/key.pem"})


def test_what_the_engine_decides_is_not_left_to_properties() -> None:
    told = (ROOT / "docs" / "topics.md").read_text(encoding="utf-8")
    for name in _RESERVED:
        assert f"`{name}`" in told
        with pytest.raises(ConfigError, match=f"source.properties: {name} cannot be set"):
            parse(properties={name: "read_uncommitted", "client.id": "ours"})
    topics = topic_settings(parse(properties={"client.id": "ours", "message.max.bytes": "5000000"}))
    assert java_properties(topics.properties) == {"client.id": "ours", "max.request.size": "5000000"}
    assert java_properties((("sasl.mechanisms", "PLAIN"),)) == {"sasl.mechanism": "PLAIN"}


@pytest.mark.parametrize(
    "connection",
    [
        "kafka://user:secret@one:9092",
        '{"conn_type": "kafka", "login": "user", "password": "secret", "extra": {"bootstrap.servers": "one:9092"}}',
        '{"extra": {"bootstrap.servers": "one:9092", "sasl.username": "user", "sasl.password": "secret", "topics": 1}}',
    ],
)
def test_a_connection_of_airflow(connection: str) -> None:
    topics = topic_settings(parse({"AIRFLOW_CONN_CLICKS": connection}, brokers=None, conn_id="clicks"))
    assert topics.brokers == "one:9092"
    assert dict(topics.properties) == {"sasl.username": "user", "sasl.password": "secret"}


def test_dags_are_parsed_without_connections() -> None:
    source = {**SOURCE, "brokers": "${BROKERS}", "properties": {"sasl.password": "${PW}"}}
    assert Pipeline.parse(document(source=source), {}, resolve=False).source.captured == ("clicks",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topics": None}, "source.topics"),
        ({"pattern": "c.*"}, "source.topics"),
        ({"topics": []}, "a list of topic names"),
        ({"topics": None, "pattern": "("}, "a regular expression"),
        ({"brokers": "user:pw@one:9092"}, "properties"),
        ({"brokers": None}, "source.brokers"),
        ({"columns": None}, "source.columns"),
        ({"table": "sums"}, "schema.table"),
        ({"key": "id"}, "a list of columns"),
        ({"watermark": {"column": "at"}}, "source.watermark.delay"),
        ({"watermark": {"column": "at", "delay": "soon"}}, "a duration"),
        ({"late": "keep"}, "drop, count"),
        ({"bad_records": "ignore"}, "dead_letter"),
        ({"bad_records": {"dead_letter": "a b"}}, "the name of a topic"),
        ({"bad_records": {"dead_letter": "clicks"}}, "one of the topics that are read"),
        ({"topics": None, "pattern": "c.*", "bad_records": {"dead_letter": "clicks-dead"}}, "one of the topics"),
        ({"checkpoint": "relative"}, "a URL"),
        ({"format": "xml"}, "json, avro, debezium"),
        ({"format": "avro"}, "source.registry"),
        ({"registry": "http://registry"}, "unknown key"),
        ({"slot": "mine"}, "unknown key"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse(**changes)
    assert said in f"{told.value.message} {told.value.solution}"
    assert "pw" not in told.value.message
