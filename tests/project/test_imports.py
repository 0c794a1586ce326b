"""The modules of the package import each other in one direction; `make lint` holds the folders to theirs."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("airflow_cdc_provider", cache_dir=None)
    found = {
        module: graph.find_modules_directly_imported_by(module) - {"airflow_cdc_provider"} for module in graph.modules
    }
    try:
        TopologicalSorter(found).prepare()
    except CycleError as e:
        pytest.fail(f"a circle: {' -> '.join(e.args[1])}")
