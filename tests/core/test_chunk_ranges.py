"""Groups of chunks: their number and length, and their form on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

# isort: split

from airflow_cdc_provider.engine.core.chunk_ranges import parse_chunks, part_of, plan_groups
from airflow_cdc_provider.engine.core.errors import ConfigError


def chunks(**tables: int) -> list[dict[str, Any]]:
    """Return unfinished chunks of a hundred keys each."""
    return [
        {
            "table": table,
            "index": i,
            "lower": str(i * 100) if i else "",
            "upper": str(i * 100 + 100) if i < n - 1 else "",
        }
        for table, n in tables.items()
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("unfinished", "groups", "planned"),
    [
        ([], 2, []),
        (
            chunks(**{"n" * 300: 2}),
            1,
            [("n" * 249 + "…", [["n" * 300, 0, 1]])],
        ),
        (chunks(t=1), 4, [("t all rows, 1 chunk", [["t", 0, 0]])]),
        (chunks(t=5), 2, [("t .. 200, 2 chunks", [["t", 0, 1]]), ("t 200 .., 3 chunks", [["t", 2, 4]])]),
        (chunks(a=2, b=2), 1, [("a … b, 4 chunks of 2 tables", [["a", 0, 1], ["b", 0, 1]])]),
        (chunks(t=5)[::2], 1, [("t all rows, 3 chunks", [["t", 0, 4]])]),
    ],
)
def test_groups_of_chunks(unfinished: list[dict[str, Any]], groups: int, planned: list[tuple[str, Any]]) -> None:
    assert [(group["label"], group["chunks"]) for group in plan_groups(unfinished, groups)] == planned


def test_any_number_of_chunks_is_a_few_groups_of_a_bearable_length() -> None:
    (group,) = plan_groups(chunks(t=10_001), 1)
    assert group["chunks"] == [["t", 0, 10_000]]
    many = plan_groups(chunks(**{f"schema.a_table_of_the_source_{n}": 1 for n in range(10_001)}), 2)
    assert 3 < len(many) < 21
    # A table of very many chunks does not force many small tables into one group.
    uneven = plan_groups(chunks(**{f"schema.a_table_{n}_of_many": 1 for n in range(3000)}, t=200_000), 2)
    assert max(len(json.dumps(group["chunks"])) for group in uneven) < 100_000
    assert sum(len(group["chunks"]) for group in many) == 10_001
    assert max(len(json.dumps(group["chunks"])) for group in many) < 100_000


def test_ranges_on_a_command_line() -> None:
    ranges = parse_chunks('[["We ird.Sel ect", 0, 9]]')

    assert ranges == (("We ird.Sel ect", 0, 9),)
    assert part_of(ranges) == part_of([["We ird.Sel ect", 0, 9]])  # type: ignore[list-item]
    assert part_of(ranges) != part_of((("We ird.Sel ect", 0, 8),))
    for wrong in ("", "3", '[["t", 2, 1]]', '[["t", 0]]', "[[0, 0, 1]]", '[["t", 0, true]]', '{"t": 1}'):
        with pytest.raises(ConfigError, match="not a list of ranges"):
            parse_chunks(wrong)
