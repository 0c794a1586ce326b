"""The pipeline file: its contents, and that every error in it is refused with its path, value and remedy."""

from __future__ import annotations

import json
from typing import Any

import psycopg2.extensions
import pytest

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import connection_uri
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.postgres.connection import describe, session_dsn
from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE
from tests.support.pipeline_files import DOCUMENT, document


def test_defaults() -> None:
    pipeline = Pipeline.parse(DOCUMENT)
    assert (pipeline.source.slot, pipeline.source.publication) == ("airflow_cdc_shop", "airflow_cdc_shop")
    assert (pipeline.sink.mode, pipeline.sink.schema) == ("mirror", "{schema}")
    assert (pipeline.stream.trigger, pipeline.stream.max_batch_bytes, pipeline.stream.heartbeat) == (
        2.0,
        64 << 20,
        10.0,
    )
    assert pipeline.spark.master == "local[2]"


def test_units() -> None:
    stream = {"trigger": "500 ms", "max_batch_bytes": "8MiB", "heartbeat": "1 minute"}
    pipeline = Pipeline.parse(document(stream=stream))
    assert (pipeline.stream.trigger, pipeline.stream.max_batch_bytes, pipeline.stream.heartbeat) == (0.5, 8 << 20, 60.0)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("0.0.0.0:9464", "0.0.0.0", 9464), ("[::1]:0", "::1", 0), ("Driver-1.example:1", "driver-1.example", 1)],
)
def test_an_address_for_metrics(address: str, host: str, port: int) -> None:
    assert Pipeline.parse(document(metrics={"prometheus": address})).metrics.prometheus == (host, port)


def test_table_rules() -> None:
    tables = ["public.orders", "sales.*", {"table": "public.events", "columns": ["id", "at"], "where": "id > 0"}]
    assert Pipeline.parse(document(source__tables=tables)).source.tables == (
        TableRule("public.orders"),
        TableRule("sales.*"),
        TableRule("public.events", ("id", "at"), "id > 0"),
    )


def test_variables_and_connections() -> None:
    changed = document(source__dsn="postgresql://cdc:${PW}@db/shop", sink__dsn=None, sink__conn_id="dw_pg")
    pipeline = Pipeline.parse(changed, {"PW": "secret", "AIRFLOW_CONN_DW_PG": "postgres://u:p@h:1/d"})
    assert pipeline.source.dsn == "postgresql://cdc:secret@db/shop"
    assert pipeline.sink.dsn == "postgresql://u:p@h:1/d"
    assert "secret" not in repr(pipeline)


@pytest.mark.parametrize(
    ("own", "packages"),
    [({}, PACKAGE), ({"spark.jars.packages": "a:b:1"}, f"{PACKAGE},a:b:1"), ({"spark.jars.packages": ""}, "")],
)
def test_a_list_of_sparks_joins_that_of_a_sink_unless_it_is_empty(own: dict[str, str], packages: str) -> None:
    sinks = [{"type": "delta", "path": "/lake"}, DOCUMENT["sink"]]
    pipeline = Pipeline.parse(document(sink=sinks, spark={"conf": own}))
    assert pipeline.spark_conf["spark.jars.packages"] == packages


def test_what_two_sinks_need_of_spark_is_named_once() -> None:
    sinks = [{"type": "delta", "path": path} for path in ("/lake", "/other")]
    pipeline = Pipeline.parse(document(sink=sinks))
    assert pipeline.spark_conf["spark.jars.packages"] == PACKAGE


def test_the_jvm_of_a_local_spark_has_one_compiler_unless_rows_pass_through_it() -> None:
    name = "spark.driver.defaultJavaOptions"

    def has_one(master: str, **changes: Any) -> bool:
        conf = Pipeline.parse(document(**changes), {}).spark_conf_on(master)
        return "-XX:TieredStopAtLevel=1" in conf.get(name, "").split()

    assert all(map(has_one, ("local", "local[2]", "local[*]")))
    assert not any(map(has_one, ("local-cluster[2,1,1024]", "spark://m:7077", "yarn")))
    assert not has_one("local[2]", sink=[{"type": "delta", "path": "/lake"}, DOCUMENT["sink"]])
    topics = {"type": "kafka", "brokers": "b:1", "topics": ["t"], "columns": "id bigint", "table": "public.t"}
    assert not has_one("local[2]", source=topics)
    conf = {name: "-Xmx1g", "spark.driver.extraJavaOptions": "-Da=b"}
    own = Pipeline.parse(document(spark={"conf": conf}), {})
    assert own.spark_conf_on("local[2]") == own.spark_conf == conf


@pytest.mark.parametrize("key", ["sink", "source", "stream", "spark"])
def test_a_variable_that_is_unknown_is_no_mapping(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Pipeline.parse(document(**{key: "${UNKNOWN}"}), {}, resolve=False)
    Pipeline.parse(document(spark={"conf": "${UNKNOWN}"}, state="${UNKNOWN}/shop"), {}, resolve=False)


def test_a_connection_may_be_json() -> None:
    connection = {"conn_type": "postgres", "login": "me@x", "password": "p/w", "host": "h", "port": 5, "schema": "d"}
    assert connection_uri(json.dumps(connection)) == "postgresql://me%40x:p%2Fw@h:5/d"
    assert connection_uri(json.dumps(connection | {"extra": {"sslmode": "require"}})).endswith("/d?sslmode=require")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": "Shop!"}, ["pipeline", "a text", "a-z"]),
        ({"pipeline": None}, ["pipeline", "missing"]),
        ({"state": None}, ["state", "missing"]),
        ({"source__dsn": None}, ["source.dsn", "missing"]),
        ({"source__tables": []}, ["source.tables", "list"]),
        ({"source__tables": ["orders"]}, ["source.tables", "schema.table"]),
        (
            {"source__tables": [{"table": "public.t", "where": "true); DROP TABLE public.t; SELECT (1"}]},
            ["source.tables", "one SQL condition", "parenthesis"],
        ),
        ({"source__type": "oracle"}, ["source.type", "a text", "postgres"]),
        ({"source__slot": "Über"}, ["source.slot", "a text"]),
        ({"sink__mode": "mirrored"}, ["sink.mode", "'mirrored'", "mirror, changelog"]),
        ({"sink__conn_id": "x"}, ["sink", "both dsn and conn_id"]),
        ({"snapshot": {"chunk_rows": 0}}, ["snapshot.chunk_rows", "0", "from 1 on"]),
        ({"snapshot": {"chunk_rows": True}}, ["snapshot.chunk_rows", "true"]),
        ({"stream": {"trigger": "soon"}}, ["stream.trigger", "a text", "2 seconds"]),
        ({"stream": {"heartbeat": 0}}, ["stream.heartbeat", "above zero"]),
        ({"stream": {"max_batch_bytes": "64MB"}}, ["stream.max_batch_bytes", "'64MB'", "64MiB"]),
        ({"stream": {"batch": 1}}, ["stream.batch", "unknown key", "heartbeat"]),
        ({"metrics": {}}, ["metrics.prometheus", "missing"]),
        ({"metrics": {"prometheus": 9464}}, ["metrics.prometheus", "9464", "127.0.0.1:9464"]),
        ({"metrics": {"prometheus": "localhost"}}, ["metrics.prometheus", "a text", "127.0.0.1:9464"]),
        ({"metrics": {"prometheus": ":9464"}}, ["metrics.prometheus", "a text"]),
        ({"metrics": {"prometheus": "localhost:70000"}}, ["metrics.prometheus", "a text"]),
        ({"metrics": {"prometheus": "http://localhost:1"}}, ["metrics.prometheus", "a text"]),
        ({"sinks": {}}, ["sinks", "unknown key"]),
        ({"spark": []}, ["spark", "mapping"]),
    ],
)
def test_what_is_wrong_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Pipeline.parse(document(**changes))
    text = f"{refused.value.message} {refused.value.solution}"
    assert all(word in text for word in words), text


@pytest.mark.parametrize("hosts", ["a:5432,b:5433", "a,b:5433", "a:5432,b", "[::1]:5432,127.0.0.1:5433"])
def test_a_list_of_hosts_is_a_source(hosts: str) -> None:
    dsn = f"postgresql://u:secret@{hosts}/d?target_session_attrs=read-write"
    assert Pipeline.parse(document(source__dsn=dsn)).source.dsn == dsn
    assert describe(dsn) == f"{hosts}/d"
    known = psycopg2.extensions.parse_dsn(session_dsn(dsn, "application"))
    assert known | psycopg2.extensions.parse_dsn(dsn) == known


@pytest.mark.parametrize(
    "dsn",
    [
        "nonsense:hunter2",
        "postgresql://u:hunter2@h",
        "mysql://u:hunter2@h/d",
        "postgresql://u:hunter2@h:x/d",
        "postgresql://u:hunter2@h:1,i:0/d",
    ],
)
def test_a_bad_dsn_is_not_repeated(dsn: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Pipeline.parse(document(source__dsn=dsn))
    assert "source.dsn" in refused.value.message
    assert "hunter2" not in f"{refused.value} {refused.value.solution} {refused.value.__cause__!r}"


def test_an_unset_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="NOWHERE"):
        Pipeline.parse(document(state="file://${NOWHERE}/x"), {})


def test_a_file_that_is_not_yaml(tmp_path: Any) -> None:
    (tmp_path / "p.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        Pipeline.load(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Pipeline.load(tmp_path / "none.yaml")


def test_an_error_in_a_file_names_its_line(tmp_path: Any) -> None:
    text = (
        "pipeline: shop\nstate: /tmp/x\nsource:\n  dsn: postgresql://u@h/d\n  tables: [a.b]\n"
        "sink:\n  - dsn: postgresql://u@h/e\n  - dsn: postgresql://u@h/f\n    views: {dwd.t: {sql: s}}\n"
    )
    file = tmp_path / "p.yaml"
    wrong = [("[a.b]", "1", 5), ("sql: s", "sqll: s", 9), ("/f\n", "/f\n    mode: miror\n", 9), ("/tmp/x", "5", 2)]
    for old, new, line in wrong:
        file.write_text(text.replace(old, new))
        for read in (Pipeline.load, Pipeline.outline):
            with pytest.raises(ConfigError) as refused:
                read(file)
            assert refused.value.message.startswith(f"{file}, line {line}: "), refused.value.message
    file.write_text(text.replace("state: /tmp/x\n", ""))
    with pytest.raises(ConfigError, match=r"^state is missing"):
        Pipeline.load(file)
