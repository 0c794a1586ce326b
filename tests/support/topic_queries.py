"""Queries over topics."""

from __future__ import annotations

ORDERS = "id BIGINT NOT NULL, amount DECIMAL(12, 2), note STRING"


CLICKS = "id STRING NOT NULL, at TIMESTAMP NOT NULL, value BIGINT"


SUMS = {
    "key": ["id", "start"],
    "watermark": {"column": "at", "delay": "4 seconds"},
    "sql": "SELECT id, window.start AS start, sum(value) AS total FROM messages GROUP BY id, window(at, '2 seconds')",
}
