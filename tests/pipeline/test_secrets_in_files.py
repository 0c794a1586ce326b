"""Errors in a pipeline file are reported without showing values that may be passwords, wherever they occur."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.plugins.pipeline_files import find_pipelines

SECRET = "n0tTelling7"
FORMS = (
    SECRET,
    f"postgresql://cdc:{SECRET}@db:5432/shop",
    f"postgresql://cdc:p@{SECRET}@db:port/shop?nonsense={SECRET}",
    f"mysql://u:{SECRET}@h:99999/",
    f"{SECRET}://u@h/",
    f"cdc:{SECRET}@db",
    f"${{UNKNOWN}}{SECRET}",
    f"{{table.{SECRET}}}",
    f"{{{SECRET}}}{{table}}",
    f"pass word'\"{SECRET}; (",
    f"s3://key:{SECRET}@bucket/{SECRET}",
)
VALUES = (
    st.sampled_from(FORMS)
    | st.sampled_from(FORMS).flatmap(
        lambda text: st.sampled_from([[text], {"a": text}, [{"dsn": text}], {"password": {"is": text}}])
    )
    | st.sampled_from(FORMS[1:]).map(lambda text: {text: 1})
)
POSTGRES = {"type": "postgres", "dsn": "postgresql://cdc@db/shop", "tables": ["public.t"], "slot": "s"}
TOPICS = {
    "type": "kafka",
    "brokers": "kafka:9092",
    "properties": {"sasl.password": "x"},
    "topics": ["a"],
    "format": "avro",
    "registry": "http://registry:8081",
    "registry_properties": {"basic.auth.user.info": "a:b"},
    "columns": "id INT",
    "table": "public.t",
    "key": ["id"],
    "watermark": {"column": "at", "delay": "1 second"},
    "late": "drop",
    "bad_records": {"dead_letter": "dead"},
    "checkpoint": "s3://bucket/x",
}
SINKS = (
    {"type": "postgres", "dsn": "postgresql://cdc@db/dw", "mode": "mirror", "schema": "x"},
    {"type": "mysql", "conn_id": "dw"},
    {"type": "delta", "path": "/lake", "partition_by": {"public.t": ["id"]}, "properties": {"a": "b"}},
    {"type": "files", "path": "s3://bucket/lake", "format": "json"},
    {"type": "kafka", "brokers": "kafka:9092", "topic": "{table}", "properties": {"acks": "all"}, "format": "json"},
)
DOCUMENT = st.builds(
    lambda source, sink: {
        "pipeline": "shop",
        "source": source,
        "sink": sink,
        "state": "/var/lib/shop",
        "snapshot": {"mode": "initial", "chunk_rows": 5, "parallelism": 2},
        "stream": {"trigger": "2 seconds", "max_batch_bytes": "64MiB", "restart": {"strategy": "fixed-delay"}},
        "spark": {"master": "local[2]", "conf": {"spark.a": "b"}},
        "metrics": {"prometheus": "127.0.0.1:9464"},
    },
    st.sampled_from([POSTGRES, TOPICS]),
    st.sampled_from(SINKS) | st.lists(st.sampled_from(SINKS), min_size=1, max_size=2),
)


def mappings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all mappings."""
    if isinstance(value, dict):
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from mappings(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], key: str, new: Any) -> Any:
    if not path:
        return {**value, key: new}
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], key, new)
    return copy


def assert_untold(error: CdcError, secret: str = SECRET) -> None:
    told = "\n".join([error.message, error.solution, repr(error), *traceback.format_exception(error)])
    assert secret.lower() not in told.lower().replace(str(Path(__file__).parent).lower(), "")


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_no_error_shows_a_secret_that_stands_anywhere(data: st.DataObject) -> None:
    document = data.draw(DOCUMENT)
    place = data.draw(st.sampled_from(list(mappings(document))))
    inside = document
    for step in place:
        inside = inside[step]
    keys = [*inside, "password", "dsn", "pasword", "conn_id", "table", "strategy", "attempts"]
    key, value = data.draw(st.sampled_from(keys)), data.draw(VALUES)
    assume(key != "conn_id" or value != SECRET)  # the id of a connection is shown, if it may be one
    document = put(document, place, key, value)
    environment = {"AIRFLOW_CONN_DW": "mysql://u:p@h/"}
    for resolve in (True, False):
        try:
            Pipeline.parse(document, environment, resolve=resolve)
        except CdcError as error:
            assert_untold(error)


# No shorter ones, which may be the number of a line in the traceback.
@given(st.integers(10**6, 10**9).map(str), st.sampled_from(["name", "password", "slot"]))
def test_not_even_one_that_is_a_number(number: str, key: str) -> None:
    document = {"pipeline": "p", "source": POSTGRES | {key: int(number)}, "sink": SINKS[0], "state": "/s"}
    with pytest.raises(ConfigError) as refused:
        Pipeline.parse(document, {})
    assert_untold(refused.value, number)


@pytest.mark.parametrize(
    "line",
    [
        "dsn: *{}", "dsn: !{} x", "dsn: !!int {}", "dsn: {}: {}", "dsn: '{}", "dsn: \"{}\\q\"", "dsn: %{}", "dsn: @{}",
        "dsn {}", "- {}", "{{dsn: {}", "dsn: !<{}> a", "dsn: !e!{} a", "dsn: [{}", "dsn: |x{}", "&{} &{} a", "? {}",
        "<<: {}", "dsn: !!timestamp {}", "dsn: 2024-02-30 # {}", "dsn: !!binary {}", "dsn: !!python/name:{} x",
        "dsn: {}\n  slot: x: y", "\tdsn: {}", "dsn: {}\x00", "{}", "dsn postgresql://u:{}@h/db", "{{postgresql://u:{}@h/d}}",
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_not_quoted(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.yaml"
    text = line.replace("{{", "\0").replace("{}", SECRET).replace("\0", "{")
    file.write_text(f"pipeline: p\nsource:\n  type: postgres\n  {text}\nsink: {{dsn: x}}\nstate: /s\n")
    for read in (Pipeline.load, Pipeline.outline, load_pipeline):
        with pytest.raises(ConfigError) as refused:
            read(file)
        assert_untold(refused.value)
    (found,) = find_pipelines(str(tmp_path))
    assert found.error is not None
    assert_untold(found.error)


@pytest.mark.parametrize("form", FORMS[1:6])
def test_an_address_where_the_id_of_a_connection_belongs_is_not_shown(tmp_path: Path, form: str) -> None:
    file = tmp_path / "p.yaml"
    document = {"pipeline": "p", "source": {"conn_id": form, "tables": ["a.b"]}, "sink": SINKS[0], "state": "/s"}
    file.write_text(yaml.safe_dump(document))
    for read in (Pipeline.load, load_pipeline):
        with pytest.raises(ConfigError) as refused:
            read(file)
        assert_untold(refused.value)


def test_what_is_nearly_right_is_shown() -> None:
    document = {"pipeline": "p", "source": POSTGRES, "sink": SINKS[0] | {"mode": "miror"}, "state": "/s"}
    with pytest.raises(ConfigError, match=r"sink\.mode: 'miror' is not valid"):
        Pipeline.parse(document, {})
    document = {"pipeline": "p", "source": POSTGRES, "sink": SINKS[0], "state": "/s", "snapshot": {"parallelism": 0}}
    with pytest.raises(ConfigError, match=r"snapshot\.parallelism: 0 is not valid"):
        Pipeline.parse(document, {})
