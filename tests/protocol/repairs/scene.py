"""The common parts of the tests of repairs: a table, writes to it, a refusal, a repair, and the checks after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any, Literal

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.arguments import parser
from airflow_cdc_provider.engine.core.errors import CdcError, ExitCode
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from tests.support.pipelines import PipelineUnderTest

TABLE = "CREATE TABLE public.t (id int PRIMARY KEY, body text)"
ROWS = "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 20) n"
LOST = (
    "UPDATE public.t SET body = 'lost' WHERE id = 2",
    "DELETE FROM public.t WHERE id = 3",
    "INSERT INTO public.t VALUES (100, 'lost')",
)
AGAIN = (
    "UPDATE public.t SET body = body || ' again' WHERE id IN (2, 100)",
    "DELETE FROM public.t WHERE id = 4",
    "INSERT INTO public.t VALUES (3, 'again')",
)
DROP_SLOT = "SELECT pg_drop_replication_slot('{slot}')"

Make = Callable[..., PipelineUnderTest]
Mode = Literal["mirror", "changelog"]


def refused(pipeline: PipelineUnderTest, kind: type[CdcError], words: str) -> str:
    """Check that streaming and provisioning are refused and touch nothing, and return the solution."""
    before = content(pipeline)
    with pytest.raises(kind, match=words) as streaming:
        pipeline.apply()
    with pytest.raises(kind):
        pipeline.provision()
    assert streaming.value.exit_code == ExitCode.REFUSED
    assert content(pipeline) == before
    return streaming.value.solution


def content(pipeline: PipelineUnderTest) -> list[tuple[Any, ...]]:
    """Return the rows of the target, or none if it is gone."""
    if pipeline.target_rows("SELECT to_regclass('public.t')") == [(None,)]:
        return []
    return pipeline.target_rows("SELECT * FROM public.t ORDER BY ctid")


def carry_out(pipeline: PipelineUnderTest, solution: str) -> None:
    """Run the ``resnapshot`` that a solution names, in this process."""
    found = re.search(r"`airflow-cdc (resnapshot [^`]+)`", solution)
    assert found, solution
    options = parser().parse_args([*shlex.split(found[1]), "--pipeline", str(pipeline.file)])
    if options.all:
        provisioning.start_over(pipeline.pipeline, takeover=False)
        pipeline.copy()
    else:
        commands.resnapshot(pipeline.pipeline, tables=options.table)


def assert_healed(pipeline: PipelineUnderTest) -> None:
    """Check that changes flow again and that both sides are equal; in a changelog nothing occurs twice."""
    pipeline.source(*AGAIN)
    pipeline.apply()
    pipeline.assert_verified()
    if pipeline.pipeline.sink.mode == "mirror":
        pipeline.assert_equal()
        return
    events = "SELECT id, _op, _commit_lsn, _seq, _xid FROM public.t WHERE _op <> 't'"
    assert pipeline.target_rows(f"{events} GROUP BY 1, 2, 3, 4, 5 HAVING count(*) > 1") == []
    reads = "SELECT id, _commit_lsn FROM public.t WHERE _op = 'r' GROUP BY 1, 2 HAVING count(*) > 1"
    assert pipeline.target_rows(reads) == []
    # The three changes after the repair occur there once each, as changes.
    again = "SELECT _op::text, id FROM public.t WHERE body LIKE '%again' AND _op <> 'r' OR _op = 'd' AND id = 4"
    assert sorted(pipeline.target_rows(again)) == [("d", 4), ("i", 3), ("u", 2), ("u", 100)]
