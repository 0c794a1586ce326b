"""The provider's metadata for Airflow, and that Airflow finds it when installed."""

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
from airflow_cdc_provider.get_provider_info import get_provider_info
from airflow_cdc_provider.hooks.postgres_cdc import PostgresCdcHook
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator
from airflow_cdc_provider.sensors.base import CdcSensor

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
    """Return a JSON schema that Airflow ships."""
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
    """Return the modules in folders of the package."""
    package = Path(airflow_cdc_provider.__file__).parent
    return [
        f"{package.name}.{folder}.{path.stem}"
        for folder in folders
        for path in sorted((package / folder).glob("*.py"))
        if path.stem != "__init__"
    ]


def classes(base: type, *folders: str) -> list[type]:
    """Return the classes of a kind that folders of the package define."""
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
        own -= {"arguments"}  # a sensor sets it to its own
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


# A value for each parameter of a trigger, by its annotation.
_SAMPLES = {"str": "text", "int": 7, "float": 1.5, "bool": True, "None": None}


@pytest.mark.parametrize("kind", classes(BaseTrigger, "triggers"))
def test_a_trigger_survives_its_serialisation(kind: type[BaseTrigger]) -> None:
    parameters = {
        name: p
        for name, p in inspect.signature(kind).parameters.items()
        if p.kind is not p.VAR_KEYWORD and name not in ("conn_id", "slot", "view")  # instead of others
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
    """A connection saved in that provider's form names the cluster; the extra ``kafka`` installs the provider."""
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
