"""The modules of the package import each other in one direction, and are short; `make lint` holds the folders."""

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


@pytest.mark.parametrize("folder", ["airflow_cdc_provider", "demo", "local_servers", "benchmarks"])
def test_no_module_is_longer_than_400_lines(folder: str) -> None:
    counted = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert {path: lines for path, lines in counted.items() if lines > 400} == {}


def test_no_module_of_tests_takes_from_another() -> None:
    """What several need stands in ``tests/support``."""
    taken = re.compile(r"^\s*(?:from|import) tests\.[\w.]*\btest_\w+", re.MULTILINE)
    assert [
        str(path) for path in (ROOT / "tests").rglob("*.py") if taken.search(path.read_text(encoding="utf-8"))
    ] == []
