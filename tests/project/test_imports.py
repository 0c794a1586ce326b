"""The modules of the package import each other in one direction; `make lint` checks the folders."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

from tests.project.code_map import ROOT


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("airflow_cdc_provider", cache_dir=None)
    found = {
        module: graph.find_modules_directly_imported_by(module) - {"airflow_cdc_provider"} for module in graph.modules
    }
    try:
        TopologicalSorter(found).prepare()
    except CycleError as e:
        pytest.fail(f"a circle: {' -> '.join(e.args[1])}")


def test_no_module_of_tests_takes_from_another() -> None:
    """Shared code is in ``tests/support``."""
    taken = re.compile(r"^\s*(?:from|import) tests\.[\w.]*\btest_\w+", re.MULTILINE)
    assert [
        str(path) for path in (ROOT / "tests").rglob("*.py") if taken.search(path.read_text(encoding="utf-8"))
    ] == []
