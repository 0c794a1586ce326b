"""COPY of record batches into a real server: every value as it was, however large its row."""

from __future__ import annotations

import pyarrow as pa
import pytest
from psycopg2 import sql

from airflow_cdc_provider.engine.connection import connected
from airflow_cdc_provider.engine.sinks.postgres import copy as postgres_copy
from airflow_cdc_provider.engine.sinks.postgres.copy import copy_batches
from tests.conftest import Databases


def test_large_rows_are_copied_like_others(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever characters they hold, alone and between others."""
    monkeypatch.setattr(postgres_copy, "_LARGE_BYTES", 20)
    monkeypatch.setattr(postgres_copy, "_READ_BYTES", 3)
    quotes = postgres_copy._QUOTES
    texts = ["", None, "short", 'a "long" text, with é and \n and \r\n', quotes * 9, "\x01" * 30 + '"', "\\." * 20, "x"]
    numbers = [1, None, 3, 4, 5, 6, 7, 8]
    flags = [True, False, None, True, False, True, False, True]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(texts, pa.large_string()), pa.array(texts), pa.array(numbers), pa.array(flags)], names=list("abcd")
    )
    with connected(databases.target) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE public.c (n serial, a text, b text, c int, d bool)")
        table = sql.Identifier("public", "c")
        assert copy_batches(connection, table, list("abcd"), iter([batch, batch.slice(3, 2)])) == 10
        cursor.execute("SELECT a, b, c, d FROM public.c ORDER BY n")
        expected = list(zip(texts, texts, numbers, flags, strict=True))
        assert cursor.fetchall() == expected + expected[3:5]
