"""``messages: {values: false}``: a pipeline's messages and files contain no value of a row, and no bound of a key."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands import cli
from airflow_cdc_provider.engine.core import errors
from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.chunk_ranges import plan_groups
from airflow_cdc_provider.engine.core.errors import CdcError, StreamFailed, TargetConflict, ValueRefused
from airflow_cdc_provider.engine.spark.session import defaults_on
from airflow_cdc_provider.hooks.cdc import load_pipeline
from airflow_cdc_provider.hooks.keeper import job_failure
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

VALUE = "Mr. Hidden 4711"


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(errors._HIDDEN, "1")


@pytest.mark.parametrize("kind", [ValueRefused, TargetConflict, errors.BadRecord, errors.LimitExceeded])
def test_errors_that_may_quote_rows_say_what_is_known_without_them(kind: type[CdcError], hidden: None) -> None:
    for without, said in ((None, "may quote rows"), ("column 'a' refuses", "column 'a' refuses")):
        error = kind(f"column 'a' refuses {VALUE}", "Change it.", without)
        for each in (error, pickle.loads(pickle.dumps(error))):
            each.prefix_message("dw")
            assert said in each.message
            assert VALUE not in f"{each!r} {each} {each.as_dict()}"


def test_an_error_of_a_process_that_hides_nothing_is_hidden_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crossing = pickle.dumps(StreamFailed(f"it failed: {VALUE}", "Start again.", "it failed"))
    assert VALUE in pickle.loads(crossing).message
    monkeypatch.setenv(errors._HIDDEN, "1")
    assert pickle.loads(crossing).message == "it failed"


def test_bounds_are_in_no_title_and_no_label(hidden: None) -> None:
    chunk = Chunk("public.t", 3, (VALUE,), None)
    assert chunk.title == "public.t[3]"
    lower, upper = chunk.shown_bounds
    (group,) = plan_groups([{"table": "public.t", "index": 3, "lower": lower, "upper": upper}], 1)
    assert group["label"] == "public.t [3 .. 3], 1 chunk"


def test_executors_hide_them_too(hidden: None) -> None:
    assert defaults_on("spark://m:7077")["spark.executorEnv.AIRFLOW_CDC_HIDE_VALUES"] == "1"
    assert VALUE not in job_failure(1, VALUE)["solution"]


def test_a_pipeline_that_a_value_stops(
    databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(errors._HIDDEN, "1")  # undone after the test, whatever the commands change
    monkeypatch.delenv(errors._HIDDEN)
    pipeline = PipelineUnderTest(
        tmp_path, databases, ["public.t"], messages={"values": False}, snapshot={"chunk_rows": 1}
    )
    pipeline.source(
        "CREATE TABLE public.t (name text PRIMARY KEY, note text)",
        f"INSERT INTO public.t VALUES ('{VALUE}', 'a'), ('{VALUE} b', 'b')",
    )
    load_pipeline(pipeline.file)
    assert errors.values_hidden()
    assert cli.main(["provision", "--pipeline", str(pipeline.file)]) == 0
    assert len(commands.unfinished(pipeline.pipeline)) == 2
    pipeline.target("ALTER TABLE public.t ADD CONSTRAINT short CHECK (length(name) < 5)")
    with pytest.raises(ValueRefused, match=r"the target table public\.t cannot hold a value of public\.t") as refused:
        pipeline.copy_tables()

    pipeline.target("ALTER TABLE public.t DROP CONSTRAINT short")
    pipeline.copy_tables()
    pipeline.target("ALTER TABLE public.t ADD CONSTRAINT few CHECK (note < 'x')")
    pipeline.source("UPDATE public.t SET note = 'x' || name")
    with pytest.raises(ValueRefused, match=r"the target table public\.t cannot hold a value") as stopped:
        pipeline.apply()
    status = commands.status(pipeline.pipeline)
    assert status["last_error"]["message"] == stopped.value.message
    said = capsys.readouterr()
    assert VALUE not in f"{refused.value} {stopped.value} {said.out} {said.err} {json.dumps(status)}"
    left = b"".join(file.read_bytes() for file in pipeline.state.rglob("*") if file.is_file())
    assert VALUE.encode() not in left
