"""Values that Debezium leaves out of a message because they are unchanged: targets keep their values."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.effect import ERASED, MISSING
from airflow_cdc_provider.engine.core.errors import BadRecord
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table
from airflow_cdc_provider.engine.sources.kafka.staging_task import LEFT_OUT, RESULT_OP, UNSENT, TopicTexts, last_texts
from airflow_cdc_provider.engine.sources.kafka.unchanged_values import net_of
from local_servers.kafka import KafkaServer
from local_servers.mariadb import MariadbServer
from tests.conftest import Databases
from tests.support.kafka_pipeline import KafkaPipeline
from tests.support.kafka_server import create_topic
from tests.support.mysql import query
from tests.support.spark_jars import DELTA, require_jars
from tests.support.topics import TopicsPipeline

DOC = "id INT NOT NULL, n INT, body STRING, data BINARY"
WHOLE = {"id": 1, "n": 1, "body": "x" * 9000, "data": base64.b64encode(b"\x00\xff").decode()}


def table() -> Table:
    names = ("id", "a", "b")
    columns = tuple(
        Column(name=n, type="text", type_oid=25, collation=None, not_null=False, builtin=True, attnum=i)
        for i, n in enumerate(names, 1)
    )
    return Table(1, "public", "t", columns, ("id",), "d", None, (Leaf(1, "public", "t"),), "r", 3)


def texts(*values: str | None) -> pa.Array:
    return pa.array(values, pa.large_string())


def mask(*values: int) -> Any:
    return np.array(values, dtype=np.bool_)


def test_the_last_row_of_a_key_has_what_those_before_it_tell() -> None:
    columns = [texts("1", "2", "1", "1", "3"), texts("x", None, None, "y", None), texts("p", "q", None, None, None)]
    away = {1: mask(0, 1, 1, 0, 1), 2: mask(0, 0, 1, 1, 1)}
    net = net_of(table(), columns, texts("i", "u", "u", "u", "u"), away).to_pydict()
    assert net[ERASED] == [False] * 3
    rows = list(zip(net["c0"], net["c1"], net["c2"], strict=True))
    assert rows == [("2", None, "q"), ("1", "y", "p"), ("3", None, None)]
    assert net[MISSING] == ["{1}", None, "{1,2}"]
    assert net["o0"] == ["2", None, "3"]


def test_texts_of_several_tasks_come_to_the_same() -> None:
    first = {"c0": texts("1", "2"), "c1": texts("x", UNSENT), "c2": texts("p", "q"), RESULT_OP: texts("i", "u")}
    second = {"c0": texts("1", "2"), "c1": texts(UNSENT, None), "c2": texts("r", None), RESULT_OP: texts("u", "d")}
    parts = [last_texts(pa.table(each), table()) for each in (first, second)]
    both = pa.concat_tables(parts, promote_options="permissive")
    found = last_texts(both, table()).to_pylist()
    assert found == [
        {"c0": "1", "c1": "x", "c2": "r", RESULT_OP: "u"},
        {"c0": "2", "c1": None, "c2": None, RESULT_OP: "d"},
    ]


@pytest.mark.parametrize(("keyed", "there"), [(True, UNSENT), (False, None)])
def test_row_by_row_a_value_that_is_left_out_is_compared_as_a_changelog_has_it(keyed: bool, there: str | None) -> None:
    columns = {"c0": ["1", "2"], "c1": [None, "x"], "c2": ["p", None], LEFT_OUT: [["a"], None]}
    (found,) = TopicTexts(table(), keyed)(iter([pa.RecordBatch.from_pydict(columns)]))
    assert found["c1"].to_pylist() == [there, "x"]
    assert found["c2"].to_pylist() == ["p", None]


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shared_session")
def test_a_mirror_keeps_what_messages_leave_out_and_verify_knows(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, DOC, partitions=1, key=["id"], format="debezium")
    pipeline.change(source={"unavailable_value": "(away)"})
    placeholder = {"body": "(away)", "data": base64.b64encode(b"(away)").decode()}
    pipeline.send({"op": "r", "after": WHOLE}, {"op": "c", "after": {**WHOLE, "id": 2, "body": "short"}})
    pipeline.catch_up()
    pipeline.send(
        {"op": "u", "after": {**WHOLE, "n": 2, **placeholder}},
        {"op": "u", "after": {"id": 2, "n": 2, "body": "longer", "data": placeholder["data"]}},
        {"op": "u", "after": {"id": 2, "n": 3, **placeholder}},
    )
    pipeline.catch_up()
    rows = "SELECT id, n, body, data FROM t ORDER BY id"
    expected = [(1, 2, WHOLE["body"], b"\x00\xff"), (2, 3, "longer", b"\x00\xff")]
    assert [(*row[:3], bytes(row[3])) for row in pipeline.target_rows(rows)] == expected
    assert commands.verify(pipeline.pipeline)["equal"]
    pipeline.target("UPDATE public.t SET body = '(away)' WHERE id = 1")
    assert not commands.verify(pipeline.pipeline)["equal"]
    pipeline.send({"op": "u", "after": {"id": 3, "n": 1, **placeholder}})
    with pytest.raises(BadRecord, match=r"message 5 of .*a row that the target does not have \(public.t, key 3\)"):
        pipeline.catch_up()


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_mirrors_of_other_sinks_keep_it_too(
    databases: Databases, kafka: KafkaServer, mariadb: MariadbServer, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, DOC, partitions=1, key=["id"], format="debezium")
    require_jars(DELTA)
    pipeline.change(sink=None)
    mysql = {"type": "mysql", "dsn": mariadb.dsn, "schema": "mirror"}
    plain = {"deletion_vectors": False, "properties": {"delta.columnMapping.mode": "none"}}  # for other readers
    pipeline.change(sink=[mysql, {"type": "delta", "path": str(tmp_path / "lake"), "mode": "mirror", **plain}])
    placeholder = "__debezium_unavailable_value"
    pipeline.send({"op": "r", "after": WHOLE}, {"op": "c", "after": {**WHOLE, "id": 2}})
    pipeline.run("run")
    pipeline.send(
        {"op": "u", "after": {**WHOLE, "n": 2, "body": placeholder}},
        {"op": "u", "after": {**WHOLE, "id": 2, "body": "short"}},
        {"op": "u", "after": {**WHOLE, "id": 2, "n": 3, "body": placeholder}},
    )
    pipeline.run("run")
    pipeline.run("verify")
    expected = [(1, 2, WHOLE["body"]), (2, 3, "short")]
    assert query(mariadb, "SELECT id, n, body FROM mirror.t ORDER BY id") == expected
    rows = deltalake.DeltaTable(str(tmp_path / "lake/public/t")).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["n"], row["body"]) for row in rows) == expected


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.thorough
@pytest.mark.usefixtures("shared_session")
def test_an_update_of_a_row_whose_insert_was_set_aside_is_named(
    databases: Databases, kafka: KafkaServer, tmp_path: Path
) -> None:
    pipeline = TopicsPipeline(tmp_path, databases, kafka, DOC, partitions=1, key=["id"], format="debezium")
    dead = f"{pipeline.topic}-dead"
    create_topic(kafka.brokers, dead)
    pipeline.change(source={"bad_records": {"dead_letter": dead}})
    placeholder = "__debezium_unavailable_value"
    pipeline.send(
        {"op": "c", "after": WHOLE},
        {"op": "c", "after": {**WHOLE, "id": 2, "body": "a\0b"}},
        {"op": "u", "after": {**WHOLE, "n": 2, "body": placeholder}},
        {"op": "u", "after": {**WHOLE, "id": 2, "body": placeholder}},
        {"op": "u", "after": {**WHOLE, "n": 3, "body": placeholder}},
    )
    with pytest.raises(BadRecord, match=r"message 3 of .*, key 2\)") as told:
        pipeline.catch_up()
    assert f"skip --topic {pipeline.topic} --partition 0 --offset 3`" in told.value.solution
    commands.skip(pipeline.pipeline, pipeline.topic, 0, [(3, 3)])
    pipeline.catch_up()
    assert pipeline.target_rows("SELECT id, n, length(body) FROM t") == [(1, 3, 9000)]
    assert commands.verify(pipeline.pipeline)["equal"]


@pytest.mark.thorough
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("shared_session")
def test_our_own_sink_feeds_our_own_source(databases: Databases, kafka: KafkaServer, tmp_path: Path) -> None:
    """The target is a mirror, or a changelog, which marks unknown values."""
    first = KafkaPipeline(tmp_path, databases, ["public.doc"], kafka.brokers, partitions=2, truncates=True)
    first.source(
        "CREATE TABLE public.doc (id int PRIMARY KEY, n int, body text, data bytea)",
        "ALTER TABLE public.doc ALTER body SET STORAGE EXTERNAL, ALTER data SET STORAGE EXTERNAL",
        "INSERT INTO public.doc SELECT n, n, repeat('x', 9000), decode(repeat('00ff', 4000), 'hex')"
        " FROM generate_series(1, 4) n",
    )
    first.provision()
    first.copy(table="public.doc")
    first.source("UPDATE public.doc SET n = 10 * n")
    first.apply()

    def follower(mode: str) -> TopicsPipeline:
        (tmp_path / mode).mkdir()
        made = TopicsPipeline(
            tmp_path / mode, databases, kafka, DOC, key=["id"], format="debezium", table=f"public.{mode}"
        )
        made.change(pipeline=f"{made.name}_{mode}", source={"topics": [first.topic("public.doc")]}, sink={"mode": mode})
        made.catch_up()
        assert commands.verify(made.pipeline)["equal"]
        return made

    mirror, _ = follower("mirror"), follower("changelog")
    found = mirror.target_rows("SELECT id, n, length(body), length(data) FROM mirror ORDER BY id")
    assert found == [(n, 10 * n, 9000, 8000) for n in range(1, 5)]
    told = "SELECT DISTINCT _unchanged::text, body FROM changelog WHERE _op = 'u'"
    assert mirror.target_rows(told) == [("{body,data}", None)]
    first.source("TRUNCATE public.doc", "INSERT INTO public.doc VALUES (9, 9, 'new', NULL)")
    first.apply()
    mirror.catch_up()
    assert mirror.target_rows("SELECT id, body FROM mirror") == [(9, "new")]
    assert commands.verify(mirror.pipeline)["equal"]
