"""A user of Kafka that logs in: its privileges are sufficient, and its password is in no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import ConnectionFailed, MissingPrivilege
from airflow_cdc_provider.engine.sources.kafka.settings import topic_settings
from airflow_cdc_provider.engine.sources.kafka.topics import Topics
from tests.conftest import Databases
from tests.support.kafka_server import committed, create_topic, make_broker
from tests.support.kafka_users import USER, grant
from tests.support.topics import TopicsPipeline

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_login_is_used_by_all_and_shown_by_none(databases: Databases, server_directory: Path, tmp_path: Path) -> None:
    with make_broker(server_directory / f"login-{tmp_path.name}", login=USER) as server:
        pipeline = TopicsPipeline(tmp_path, databases, server, "id BIGINT NOT NULL", key=["id"])
        dead = f"{pipeline.topic}-dead"
        create_topic(server.brokers, dead)
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": USER.user}
        pipeline.change(
            source={
                "brokers": server.login_brokers,
                "properties": {**login, "sasl.password": f"{USER.password} "},
                "bad_records": {"dead_letter": dead},
            }
        )
        findings = preflight(pipeline.pipeline)
        (warned,) = [finding.message for finding in findings if finding.check == "encryption"]
        assert "the brokers (security.protocol is SASL_PLAINTEXT)" in warned
        found = next(finding for finding in findings if not finding.ok)
        assert isinstance(found.error, ConnectionFailed)
        assert "password" in found.error.solution

        pipeline.change(source={"properties": {**login, "sasl.password": USER.password}})
        topics = topic_settings(pipeline.pipeline)
        assert topics is not None
        with pytest.raises(MissingPrivilege):
            Topics(topics).named()
        grant(server, ResourceType.TOPIC, pipeline.topic, AclOperation.READ)
        grant(server, ResourceType.TOPIC, dead, AclOperation.WRITE)

        events = tmp_path / "events"
        events.mkdir()
        conf = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{events}", "spark.log.level": "INFO"}
        conf |= {"spark.eventLog.compress": "false"}  # to be searched
        pipeline.change(spark={"conf": {**pipeline.document["spark"]["conf"], **conf}})
        pipeline.send({"id": 1}, b"bad")
        outcome = pipeline.run_here("run")
        assert pipeline.target_rows("SELECT id FROM t") == [(1,)]
        assert [message.value for message in committed(server.brokers, dead)] == [b"bad"]
        shown = [outcome.stdout, outcome.stderr]
        shown += [
            file.read_text(errors="replace")
            for file in (*events.rglob("*"), *pipeline.state.rglob("*"))
            if file.is_file()
        ]
        assert any("SparkListenerSQLExecutionStart" in text for text in shown)
        for spelled in (USER.password, USER.password.replace("\\", "\\\\").replace('"', '\\"'), "u00e9"):
            assert not any(spelled in text for text in shown)
