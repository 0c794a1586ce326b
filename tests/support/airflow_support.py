"""An Airflow that only the tests use. Import this before any module of Airflow, which reads its home at import."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HOME_VARIABLE = "AIRFLOW_CDC_TEST_HOME"

if HOME_VARIABLE not in os.environ:  # a process started by a test keeps the values that the test set
    _home = tempfile.mkdtemp(prefix="cdc-airflow-")
    atexit.register(shutil.rmtree, _home, ignore_errors=True)
    os.environ |= {
        HOME_VARIABLE: _home,
        "AIRFLOW_HOME": _home,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": f"{_home}/dags",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_home}/airflow.db",
    }

ROOT = Path(__file__).parents[2]


@cache
def migrate_database() -> None:
    """Create Airflow's database once."""
    done = subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def write_pipeline(directory: Path, text: str = "", **replacements: str) -> Path:
    """Write a pipeline file whose servers are Airflow connections ``shop_pg`` and ``warehouse_pg``."""
    path = directory / "shop.yaml"
    default = (
        "pipeline: shop\n"
        "source: {conn_id: shop_pg, tables: [public.orders]}\n"
        "sink: {conn_id: warehouse_pg}\n"
        f"state: {directory}/state\n"
        'spark: {conf: {spark.ui.enabled: "false", spark.app.kept: from-file, spark.app.merged: from-file}}\n'
    )
    text = text or default
    for old, new in replacements.items():
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def connection_json(**fields: Any) -> str:
    """Return the value of an ``AIRFLOW_CONN_`` variable."""
    return json.dumps(fields)
