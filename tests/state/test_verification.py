"""The results that ``verify`` leaves in the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.verification import read_verification, write_verification


def result(table: str, rows: int, differences: int = 0) -> dict[str, Any]:
    """Return a table's object in the output of ``verify``."""
    different = {"equal": not differences, "difference_count": differences, "unsettled": 1}
    return {"table": table, "source_rows": 9, "target_rows": rows, **different}


def test_a_table_in_several_sinks_has_one_result_and_others_keep_theirs(tmp_path: Path) -> None:
    state = State(str(tmp_path))
    assert read_verification(state) == {}
    write_verification(state, [result("a.kept", 4)])
    kept = read_verification(state)["a.kept"]

    write_verification(state, [result("a.b", 9), result("a.b", 7, differences=2)])

    found = read_verification(state)
    assert found["a.kept"] == kept
    assert kept.equal
    both = found["a.b"]
    assert (both.equal, both.rows, both.differences, both.unsettled) == (False, 7, 2, 2)
    state.write("verified.json", {"tables": {"a.b": {"at": "soon"}}})
    assert read_verification(state) == {}
