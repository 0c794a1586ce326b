"""What the provider tells Airflow about itself, its hook, and pipelines with Airflow's connections."""

from __future__ import annotations

import ast
import configparser
import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.airflow_support import ROOT, connection_json, write_pipeline

# isort: split
import airflow
import jsonschema
from airflow.sdk import DAG, BaseOperator, BaseOperatorLink, BaseSensorOperator
from airflow.sdk.module_loading import import_string
from airflow.triggers.base import BaseTrigger

import airflow_cdc_provider
from airflow_cdc_provider import get_provider_info as provider_info_module
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.get_provider_info import get_provider_info
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.sensors.base import CdcSensor
from tests.conftest import Databases, ServerMaker

pytestmark = pytest.mark.airflow


DISCOVERY = """
from airflow.providers_manager import ProvidersManager

manager = ProvidersManager()
assert "airflow-cdc-provider" in manager.providers
hook = manager.hooks["postgres_cdc"]
assert hook is not None
assert (hook.hook_name, hook.connection_testable) == ("Postgres CDC", True), hook
assert hook.connection_id_attribute_name == "postgres_cdc_conn_id", hook
assert manager.field_behaviours["postgres_cdc"]["placeholders"]["port"] == "5432"
assert "extra__postgres_cdc__sslmode" in manager.connection_form_widgets, list(manager.connection_form_widgets)
"""


def schema(name: str) -> Any:
    """A JSON schema that Airflow ships."""
    return json.loads((Path(airflow.__path__[0]) / name).read_text())


def info() -> dict[str, Any]:
    return dict(get_provider_info())


def test_the_info_is_valid_for_airflow() -> None:
    jsonschema.validate(info(), schema("provider_info.schema.json"))


@pytest.mark.parametrize(
    "key",
    ["integrations", "operators", "sensors", "triggers", "hooks", "connection-types", "extra-links"],
)
def test_each_part_of_the_info_is_valid_for_the_stricter_schema_of_providers(key: str) -> None:
    jsonschema.validate(info()[key], schema("provider.yaml.schema.json")["properties"][key])


def test_the_package_name_is_that_of_the_distribution() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")

    assert info()["package-name"] == setup["metadata"]["name"]
    entry_point = "provider_info = airflow_cdc_provider.get_provider_info:get_provider_info"
    assert entry_point in setup["options.entry_points"]["apache_airflow_provider"]


def test_the_licence_and_who_stands_for_the_package_are_told() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")

    for name in setup["metadata"]["license_files"].split():
        assert (ROOT / name).read_text(encoding="utf-8").strip()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert setup["metadata"]["author"]
    assert "Documentation = https://" in setup["metadata"]["project_urls"]


def test_the_info_imports_nothing() -> None:
    tree = ast.parse(Path(provider_info_module.__file__ or "").read_text())

    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    assert [node.module for node in imports if isinstance(node, ast.ImportFrom)] == ["__future__"]
    assert len(imports) == 1


@pytest.mark.parametrize("key", ["operators", "sensors", "triggers", "hooks"])
def test_every_module_imports_and_belongs_to_an_integration(key: str) -> None:
    integrations = {integration["integration-name"] for integration in info()["integrations"]}

    for entry in info()[key]:
        assert entry["integration-name"] in integrations
        for module in entry["python-modules"]:
            assert import_module(module).__doc__


def modules(*folders: str) -> list[str]:
    """The modules in folders of the package."""
    package = Path(airflow_cdc_provider.__file__).parent
    return [
        f"{package.name}.{folder}.{path.stem}"
        for folder in folders
        for path in sorted((package / folder).glob("*.py"))
        if path.stem != "__init__"
    ]


def classes(base: type, *folders: str) -> list[type]:
    """The classes of a kind that are written in folders of the package."""
    found = {
        kind
        for module in modules(*folders)
        for kind in vars(import_module(module)).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module
    }
    return sorted(found, key=lambda kind: kind.__name__)


def test_the_info_leaves_out_nothing() -> None:
    told = {
        module
        for key in ("operators", "sensors", "hooks", "triggers")
        for e in info().get(key, [])
        for module in e["python-modules"]
    }
    public = [(BaseOperator, "operators"), (BaseSensorOperator, "sensors"), (BaseTrigger, "triggers")]

    for base, folder in public:
        written = {kind.__module__ for kind in classes(base, folder) if not inspect.isabstract(kind)}
        assert {module for module in written if not module.endswith(".base")} <= told
    links = [f"{kind.__module__}.{kind.__qualname__}" for kind in classes(BaseOperatorLink, "links")]
    assert info()["extra-links"] == links  # others would never be shown


def test_every_link_is_that_of_an_operator() -> None:
    used = {type(link) for kind in classes(CdcOperator, "operators") for link in kind.operator_extra_links}  # type: ignore[attr-defined]

    assert used == set(classes(BaseOperatorLink, "links"))


@pytest.mark.parametrize("kind", classes(BaseOperator, "operators", "sensors"))
def test_an_operator_takes_few_arguments_and_renders_those_it_names(kind: type[BaseOperator]) -> None:
    ours = [each for each in kind.__mro__ if each.__module__.startswith("airflow_cdc_provider.")]
    others = [each for each in kind.__mro__ if each not in ours]
    documents = " ".join(each.__doc__ or "" for each in ours)
    own = {
        name
        for each in ours
        if "__init__" in vars(each)
        for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }
    own -= {"mode", "poke_interval"}  # of every sensor, with other defaults
    if issubclass(kind, CdcSensor) and kind is not CdcSensor:
        own -= {"arguments"}  # which a sensor fills with its own
    inherited = {name for each in others for name in vars(each).get("template_fields", ())}

    assert len(own) <= 8, own
    assert set(kind.template_fields) - inherited <= own
    for name in own:
        _, documented, described = documents.partition(f":param {name}:")
        assert documented, f"{kind.__name__}.{name}"
        templated = "(templated)" in described.partition(":param ")[0]
        assert (name in kind.template_fields) == templated, f"{kind.__name__}.{name}"


def test_templates_work_in_nested_fields() -> None:
    with DAG("rendered", schedule=None):
        operator = CdcStreamOperator(
            task_id="t", pipeline="{{ x }}.yaml", epoch="{{ n }}", conf={"spark.app.name": "{{ x }}"}, until="{{ l }}"
        )

    operator.render_template_fields({"x": "shop", "n": 7, "l": "0/1"})  # type: ignore[typeddict-unknown-key]

    assert (operator.pipeline, operator.epoch, operator.until) == ("shop.yaml", "7", "0/1")
    assert operator.conf == {"spark.app.name": "shop"}


# Something for each parameter of a trigger, by its annotation.
_SAMPLES = {"str": "text", "int": 7, "float": 1.5, "bool": True, "None": None}


@pytest.mark.parametrize("kind", classes(BaseTrigger, "triggers"))
def test_a_trigger_survives_its_serialisation(kind: type[BaseTrigger]) -> None:
    parameters = {
        name: p
        for name, p in inspect.signature(kind).parameters.items()
        if p.kind is not p.VAR_KEYWORD and name not in ("conn_id", "slot")  # which go without a pipeline
    }
    sample = {name: _SAMPLES.get(str(p.annotation).partition(" ")[0], p.default) for name, p in parameters.items()}

    path, kwargs = kind(**sample).serialize()
    restored = import_string(path)(**json.loads(json.dumps(kwargs)))

    assert type(restored) is kind
    assert restored.serialize() == (path, kwargs)


def test_the_hook_is_the_one_of_the_connection_type() -> None:
    (entry,) = info()["connection-types"]
    module, name = entry["hook-class-name"].rsplit(".", 1)
    hook = getattr(import_module(module), name)

    assert hook is PostgresCdcHook
    assert hook.conn_type == entry["connection-type"]
    assert hook.hook_name == entry["hook-name"]
    assert hook(**{hook.conn_name_attr: "other"}).postgres_cdc_conn_id == "other"


def test_airflow_finds_the_installed_provider(tmp_path: Path) -> None:
    installed = tmp_path / "airflow_cdc_provider-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: airflow-cdc-provider\nVersion: 0.1.0\n")
    entry_point = "provider_info = airflow_cdc_provider.get_provider_info:get_provider_info"
    (installed / "entry_points.txt").write_text(f"[apache_airflow_provider]\n{entry_point}\n")

    done = subprocess.run(
        [sys.executable, "-W", "error::airflow.exceptions.AirflowProviderDeprecationWarning", "-c", DISCOVERY],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


KAFKA = """
import sys
from airflow_cdc_provider import cdc_dag
from airflow_cdc_provider.hooks.cdc import load_pipeline

cdc_dag({path!r})
assert load_pipeline({path!r}).pipeline.sink.brokers == "one:9092,two:9092"
foreign = ("airflow.providers.apache.kafka.hooks", "confluent_kafka")
loaded = {{name for name in sys.modules if name.startswith(foreign)}}
assert not loaded, loaded

from airflow.providers_manager import ProvidersManager

hook = ProvidersManager().hooks["kafka"]
assert hook is not None
assert hook.package_name == "apache-airflow-providers-apache-kafka", hook
"""


def test_the_connection_type_of_kafka_is_that_of_its_provider_which_is_not_loaded(tmp_path: Path) -> None:
    """A connection as the form of that provider saves it names the cluster; the extra ``kafka`` has the provider."""
    path = write_pipeline(
        tmp_path,
        "pipeline: shop\n"
        "source: {conn_id: shop_pg, tables: [public.orders]}\n"
        "sink: {type: kafka, conn_id: events}\n"
        f"state: {tmp_path}/state\n",
    )
    extra = {"bootstrap.servers": "one:9092,two:9092", "group.id": "others", "security.protocol": "PLAINTEXT"}
    environment = {
        "AIRFLOW_CONN_SHOP_PG": "postgresql://cdc@db/shop",
        "AIRFLOW_CONN_EVENTS": connection_json(conn_type="kafka", extra=json.dumps(extra)),
    }
    done = subprocess.run(
        [sys.executable, "-c", KAFKA.format(path=str(path))],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("connection", "uri"),
    [
        ("postgresql://cdc:pw@db:5433/shop", "postgresql://cdc:pw@db:5433/shop"),
        ("postgres-cdc://cdc@db/shop?sslmode=require", "postgresql://cdc@db/shop?sslmode=require"),
        (
            connection_json(conn_type="postgres", login="a@b", password="p:w/?#%", host="db", schema="we ird"),
            "postgresql://a%40b:p%3Aw%2F%3F%23%25@db/we%20ird",
        ),
        (
            connection_json(
                conn_type="postgres_cdc",
                host="db",
                schema="shop",
                extra={"sslmode": None, "connect_timeout": 5, "cursor": "dictcursor", "iam": True, "dbname": "x"},
            ),
            "postgresql://db/shop?connect_timeout=5",
        ),
        (
            connection_json(conn_type="postgres", host="/var/run/postgresql", schema="shop"),
            "postgresql:///shop?host=%2Fvar%2Frun%2Fpostgresql",
        ),
    ],
)
def test_the_uri_is_one_for_libpq(monkeypatch: pytest.MonkeyPatch, connection: str, uri: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", connection)

    assert PostgresCdcHook("shop_pg").get_uri() == uri


def test_a_missing_connection_and_one_of_another_type_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", "http://lake/")

    with pytest.raises(ConfigError, match="'nowhere' does not exist") as missing:
        PostgresCdcHook("nowhere").get_uri()
    with pytest.raises(ConfigError, match="of type 'http', not postgres_cdc or postgres"):
        PostgresCdcHook("lake").get_uri()

    assert "AIRFLOW_CONN_NOWHERE" in missing.value.solution


def test_a_good_server_is_described_in_sentences(monkeypatch: pytest.MonkeyPatch, databases: Databases) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert passed, text
    assert "wal_level is logical." in text
    assert "Role postgres may use replication." in text
    assert "A replication slot is free" in text


def test_the_connection_works_as_a_session(monkeypatch: pytest.MonkeyPatch, databases: Databases) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", databases.source)

    connection = PostgresCdcHook("shop_pg").get_conn()

    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
    connection.close()


def as_target(dsn: str) -> str:
    server = urlsplit(dsn)
    given = {"host": server.hostname, "port": server.port, "login": server.username, "schema": server.path[1:]}
    return connection_json(conn_type="postgres_cdc", **given, extra={"use": "target"})


def test_a_target_is_tested_as_a_target(monkeypatch: pytest.MonkeyPatch, make_server: ServerMaker) -> None:
    server = make_server(settings={"wal_level": "replica", "max_replication_slots": "0"})
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", as_target(server.dsn()))

    passed, text = PostgresCdcHook("dw_pg").test_connection()

    assert passed, text
    assert "Schemas and tables can be created and written in the sink." in text
    assert "wal_level" not in text

    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
    monkeypatch.setenv("AIRFLOW_CONN_DW_PG", as_target(server.dsn().replace("postgres@", "reader@")))

    passed, text = PostgresCdcHook("dw_pg").test_connection()

    assert not passed
    assert "role reader may not, in the sink: create schema airflow_cdc" in text


@pytest.mark.parametrize("conn_type", ["generic", "sqlite"])
@pytest.mark.parametrize("conn_id", ["shop_pg", "warehouse_pg"])
def test_a_connection_of_another_type_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conn_id: str, conn_type: str
) -> None:
    for each in ("shop_pg", "warehouse_pg"):
        kind = conn_type if each == conn_id else "postgres"
        monkeypatch.setenv(f"AIRFLOW_CONN_{each.upper()}", connection_json(conn_type=kind, host="db", schema="shop"))

    with pytest.raises(ConfigError, match=rf"{conn_id}', named by \w+\.conn_id, is of type '{conn_type}'") as refused:
        load_pipeline(write_pipeline(tmp_path))

    assert f"`airflow connections add {conn_id} --conn-uri postgres-cdc://" in refused.value.solution
    assert ("stores `generic`" in refused.value.solution) is (conn_type == "generic")


def test_every_obstacle_on_a_server_is_named(monkeypatch: pytest.MonkeyPatch, make_server: ServerMaker) -> None:
    server = make_server(settings={"wal_level": "replica", "max_replication_slots": "0"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", server.dsn().replace("postgres@", "reader@"))

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert not passed
    assert "Run: ALTER SYSTEM SET wal_level = 'logical';" in text
    assert "ALTER ROLE reader WITH REPLICATION" in text
    assert "no replication slot is free" in text


def test_a_server_that_does_not_answer_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", "postgresql://cdc:secret@127.0.0.1:1/shop")

    passed, text = PostgresCdcHook("shop_pg").test_connection()

    assert not passed
    assert text.startswith("cannot connect to 127.0.0.1:1/shop")
    assert "secret" not in text


def test_a_pipeline_gets_its_connections_from_airflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_PG", connection_json(conn_type="postgres", host="db", schema="shop"))
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE_PG", "postgres-cdc://cdc:secret@dw/dw")
    monkeypatch.setenv("SITE", "warehouse")
    monkeypatch.setenv("UNRELATED", "value")
    path = write_pipeline(tmp_path, **{"conn_id: warehouse_pg": 'conn_id: "${SITE}_pg"'})

    loaded = load_pipeline(path)

    assert loaded.pipeline.source.dsn == "postgresql://db/shop"
    assert loaded.pipeline.sink.dsn == "postgresql://cdc:secret@dw/dw"
    assert loaded.environment == {
        "AIRFLOW_CONN_SHOP_PG": "postgresql://db/shop",
        "AIRFLOW_CONN_WAREHOUSE_PG": "postgresql://cdc:secret@dw/dw",
        "SITE": "warehouse",
    }
    assert Pipeline.load(path, loaded.environment) == loaded.pipeline
    assert "secret" not in repr(loaded)


def test_a_connection_that_the_file_names_and_airflow_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'shop_pg', named by source\.conn_id, does not exist"):
        load_pipeline(write_pipeline(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [("pipeline: [", "is not YAML"), ("- a list", "must be a mapping"), ("pipeline: shop\nsource: 1", "source")],
)
def test_a_broken_file_is_refused_with_the_engines_words(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pipeline(write_pipeline(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_pipeline(tmp_path / "nowhere.yaml")
