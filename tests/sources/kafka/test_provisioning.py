"""The provisioning of a pipeline over topics, and permitted changes of its file afterwards; without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.runs.commit_records import identity_of, sink_of
from airflow_cdc_provider.engine.sources.kafka import provisioning
from local_servers.kafka import KafkaServer
from tests.conftest import Databases
from tests.support.topics import TopicsPipeline

COLUMNS = "id BIGINT NOT NULL, at TIMESTAMP, other TIMESTAMP"


def test_units_of_numbers_for_times_may_be_added_to_a_query_with_state_and_are_not_changed_then(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    """Before that, no message with such numbers contributed to a row, so nothing in the state depends on one."""
    sql = "SELECT id, max(at) AS at FROM messages GROUP BY id"
    pipeline = TopicsPipeline(tmp_path, databases, kafka, COLUMNS, key=["id"], sql=sql)
    columns = tuple(
        Column(name, kind, oid, None, not_null=name == "id", builtin=True, attnum=number)
        for number, (name, kind, oid) in enumerate((("id", "bigint", 20), ("at", "timestamp with time zone", 1184)), 1)
    )
    table = Table(1, "public", "t", columns, ("id",), "d", None, (Leaf(1, "public", "t"),), "r", 2)
    identity = identity_of(pipeline.pipeline, provisioning._first_notes(pipeline.pipeline, stateful=True))
    sink_of(pipeline.pipeline).prepare([Target(table, "public", "t")], [], identity, 0)

    def provisioned(**epochs: str) -> Any:
        pipeline.change(source={"epochs": None})
        pipeline.change(source={"epochs": epochs})
        commands.provision(pipeline.pipeline)
        return pipeline.record.identity["query"]

    before = pipeline.record.identity["query"]
    assert provisioned(at="milliseconds") == before | {"epochs": {"at": "milliseconds"}}
    with pytest.raises(ConfigError, match=r"source\.epochs"):
        provisioned(at="seconds")
    both = {"at": "milliseconds", "other": "seconds"}
    assert provisioned(**both) == before | {"epochs": both}
    with pytest.raises(ConfigError, match=r"source\.epochs"):
        provisioned(other="seconds")
