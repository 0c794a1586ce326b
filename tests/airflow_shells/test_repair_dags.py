"""The Dags that repair: what their forms accept and refuse, and which tasks run when. They run in ``tests/airflow``."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.spark.python_interpreter import SCRIPT
from tests.support.airflow_support import ROOT

# isort: split
from airflow.dag_processing.bundles.manager import _add_provider_example_dags_to_bundle
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction

pytestmark = pytest.mark.airflow

DAGS = {"cdc_backfill": "resnapshot", "cdc_resnapshot": "choose", "cdc_verify": "verify", "cdc_drop": "approve"}


@pytest.fixture(scope="module")
def dags() -> dict[str, DAG]:
    bag = DagBag(str(ROOT / "dags"))
    assert bag.import_errors == {}
    return {name: bag.dags[name] for name in DAGS}


def test_forms_have_defaults_that_work_and_describe_themselves(dags: dict[str, DAG]) -> None:
    for dag in dags.values():
        dag.params.validate()
        assert not dag.catchup
        assert [task.task_id for task in dag.roots] == [DAGS[dag.dag_id]]
        for name in dag.params:
            param = dag.params.get_param(name)
            assert param.description, name
            assert param.schema["title"], name


@pytest.mark.parametrize(
    ("dag", "name", "good", "bad"),
    [
        ("cdc_backfill", "pipeline", ["/x.yaml"], ["", None]),
        ("cdc_backfill", "tables", [[], ["public.t", "We ird.Sel ect"]], ["public.t", ["t"], ["a.b", "a.b"], [1]]),
        ("cdc_backfill", "rows", ["time", "key", "all"], ["some", ""]),
        ("cdc_backfill", "time_column", ["updated at"], ["", None]),
        ("cdc_backfill", "key_from", ["1000", None], [1000]),
        ("cdc_backfill", "from", ["2026-01-01T00:00:00+00:00", None], [20260101]),
        ("cdc_resnapshot", "everything", [True, False], ["yes"]),
        ("cdc_resnapshot", "groups", [1, 32], [0, 33, "2"]),
        ("cdc_resnapshot", "where", ["id < 3", None], [3]),
        ("cdc_drop", "approve", [True, False], [None, "no"]),
        ("cdc_verify", "pipeline", ["/x.yaml"], [""]),
    ],
)
def test_forms_refuse_what_is_wrong(dags: dict[str, DAG], dag: str, name: str, good: list[Any], bad: list[Any]) -> None:
    param = dags[dag].params.get_param(name)
    for value in good:
        assert param.resolve(value) == value
    for value in bad:
        with pytest.raises(ParamValidationError):
            param.resolve(value)


def test_a_backfill_has_days_and_nothing_runs_unasked(dags: dict[str, DAG]) -> None:
    stored = DagSerialization.from_dict(DagSerialization.to_dict(dags["cdc_backfill"]))
    first = datetime(2026, 1, 1, tzinfo=UTC)
    infos = list(stored.iter_dagrun_infos_between(first, first + timedelta(days=4)))
    assert [(info.data_interval.start, info.data_interval.end) for info in infos] == [
        (first + timedelta(days=n), first + timedelta(days=n + 1)) for n in range(5)
    ]
    for last in (None, infos[0]):
        restriction = TimeRestriction(first, None, catchup=False)
        assert stored.timetable.next_dagrun_info_v2(last_dagrun_info=last, restriction=restriction) is None


def test_the_wheel_brings_all_dags_as_examples_and_what_spark_starts(tmp_path: Path) -> None:
    found: list[Any] = []
    _add_provider_example_dags_to_bundle(found)
    assert "airflow-cdc-provider-example-dags" in [bundle.name for bundle in found]
    source = tmp_path / "source"
    for folder in ("airflow_cdc_provider", "dags"):  # a build leaves files next to its input
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo(f"airflow_cdc_provider/engine/{SCRIPT.name}").external_attr >> 16
        brought = {Path(name).name for name in archive.namelist() if "/example_dags/" in name}
    assert brought == {path.name for path in (ROOT / "dags").glob("*.py")}
    assert mode & stat.S_IXUSR, "what Spark starts can be executed"
