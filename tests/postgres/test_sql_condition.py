"""Conditions cannot leave their parentheses, as the server parses them."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg.pq import ExecStatus

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.postgres.sql_condition import find_syntax_problem
from airflow_cdc_provider.engine.runs.run_errors import last_error
from airflow_cdc_provider.engine.sources.postgres.reading import reread, reread_requests
from airflow_cdc_provider.engine.state.files import State
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

STOPS = [
    "",
    "id > 0 -- positive",
    "id > 0 /* ) ; /* nested */ ' */ AND true",
    "body = ');' AND body <> 'it''s )' AND body <> 'a\\'",
    r"body = E'\'); --' AND ascii(body) > 0",
    "body = $$);$$ OR body = $é1$ ' $$ ) $é1$",
    'name = 1 AND "a);""b" = 1 AND e$a$ = 1 AND type\'x\' = 1',
    "body IN (SELECT 'a' WHERE (true)) AND U&'\\0041' = 'A'",
]
GOES_ON = [
    "true); DROP TABLE public.t; SELECT (1",
    "id > 0) OR (true",
    "id > 0;",
    "(id > 0",
    "id > 0 /* and so on",
    "id > 0 /* /* */",
    "body = 'and so on",
    r"body = E'\'",
    "body = $a$ and so on $$",
    '"and so on',
    "id > 0 -- \n); SELECT (1",
    "id > 0 -- \r); SELECT (1",
    "1e'\\'') OR ('",
    "E'a'\n'b\\''); SELECT ('",
    "true\0",
]


@pytest.mark.parametrize("text", STOPS)
def test_conditions(text: str) -> None:
    assert find_syntax_problem(text) is None


@pytest.mark.parametrize("text", GOES_ON)
def test_what_goes_on_beyond_the_parentheses(text: str) -> None:
    assert find_syntax_problem(text)


# Quotations with different starts and ends; most of them are correct.
_CONTENT = st.lists(
    st.sampled_from(["'", "\\", '"', "$$", "$a$", "--", "/*", "*/", "\n", ")", "(", ";", "a", "1"]), max_size=5
)
_ENDS = st.sampled_from(
    [("'", "'"), ("E'", "'"), ("e'", "'"), ("U&'", "'"), ("n'", "'"), ("$$", "$$"), ("$a$", "$a$"), ("a$a$", ""),
     ("1 AS \"", '"'), ("1/*", "*/"), ("1--", "\n"), ("a.e'", "'"), ("(1", ")")]
)  # fmt: skip
_QUOTED = st.builds(lambda ends, content: ends[0] + "".join(content) + ends[1], _ENDS, _CONTENT)


def test_the_server_reads_them_alike(databases: Databases) -> None:
    """A text that the server accepts with and without parentheses is a condition; an escaping one fails without."""
    with psycopg.connect(databases.source, autocommit=True) as connection:
        accepted = 0

        def takes(text: str) -> bool:
            result = connection.pgconn.prepare(b"", text.encode())  # of one statement only
            return result.status == ExecStatus.COMMAND_OK

        @settings(max_examples=400, deadline=None)
        @given(st.lists(_QUOTED, min_size=1, max_size=2))
        @example(["E''\n''"])
        def compare(parts: list[str]) -> None:
            nonlocal accepted
            text = "||".join(parts)
            trouble = find_syntax_problem(text)
            within = takes(f"SELECT (({text}\n) IS NULL)")
            if takes(f"SELECT ({text}\n IS NULL)") and within:
                accepted += 1
                # If it continues on another line, it is refused, although it would work.
                assert trouble is None or "begins with e'" in trouble.lower()
            elif within:
                assert trouble is not None

        compare()
        assert accepted > 20


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    made = PipelineUnderTest(tmp_path, databases, ["public.t"])
    made.source("CREATE TABLE public.t (id int PRIMARY KEY, body text)", "INSERT INTO public.t VALUES (0), (1)")
    return made


@pytest.mark.slow
def test_a_re_read_by_a_condition_that_is_none(pipeline: PipelineUnderTest) -> None:
    pipeline.provision()
    pipeline.copy()
    pipeline.apply()
    for where in ("true); DROP TABLE public.t; SELECT (true", "nope > 1", "count(*) > 1", "1 / id > 0"):
        with pytest.raises(ConfigError, match=r"not (one SQL|a) condition"):
            commands.resnapshot(pipeline.pipeline, tables=["public.t"], where=where)
    pipeline.target("ALTER TABLE public.t RENAME body TO other")
    with pytest.raises(ConfigError, match=r"not a condition on public\.t: .*body"):
        reread.check(pipeline.pipeline, pipeline.record, "public.t", "body IS NULL")
    reread_requests.request(pipeline.pipeline, ["public.t"], "1 / id > 0")
    pipeline.apply()
    error = last_error(State(pipeline.pipeline.state))
    assert error is not None
    assert "division by zero" in error["message"]
