"""The starting point of the tests of races, and the states that they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from airflow_cdc_provider.engine.core.waiting import await_condition
from tests.support.databases import query_rows
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest

# Long enough, and hard enough to compress, to be stored out of line, so that updates do not send it.
BIG = "(SELECT string_agg(md5({} || '.' || i), '') FROM generate_series(1, 260) i)"
TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text, big text)"
ROWS = f"INSERT INTO public.t SELECT n, 'row ' || n, {BIG.format('n')} FROM generate_series(1, 20) n"

Make = Callable[..., PipelineUnderTest]
Mode = Literal["mirror", "changelog"]


def events(pipeline: PipelineUnderTest) -> list[tuple[Any, ...]]:
    """Return the changes of a changelog in order: kind, key, old key, columns that were not sent."""
    return pipeline.target_rows(
        "SELECT _op::text, id, (_before ->> 'id')::int, _unchanged FROM public.t WHERE _op <> 'r'"
        " ORDER BY _commit_lsn, _seq"
    )


def await_waiting(dsn: str, condition: str) -> None:
    """Wait until a session of the server is in a given state."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND {condition}"
    assert await_condition(lambda: query_rows(dsn, query) != [(0,)], SECONDS), condition
