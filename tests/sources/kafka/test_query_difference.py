"""The display of a changed query."""

from __future__ import annotations

from airflow_cdc_provider.engine.sources.kafka.query_difference import text_difference


def test_a_query_in_one_line_is_shown_clause_by_clause() -> None:
    before = "SELECT id, sum(x) AS total FROM messages WHERE x > 1 GROUP BY id"
    now = "SELECT id, sum(x) AS total FROM messages\n  WHERE x > 2 GROUP BY id"
    assert text_difference(before, now).splitlines() == [
        "--- as provisioned",
        "+++ in the file",
        " FROM messages",
        "-WHERE x > 1",
        "+WHERE x > 2",
        " GROUP BY id",
    ]


def test_a_change_of_white_space_alone_is_called_that() -> None:
    assert text_difference("SELECT id FROM m", "SELECT id\nFROM m\n") == "only white space has changed"
