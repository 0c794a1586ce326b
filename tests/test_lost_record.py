"""A commit record that is lost, wholly or in part, and made anew: what the state vouches for, and what it does not.

That the record's loss is refused, and healed as the messages say, is in ``test_repairs``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_cdc_provider.engine import provisioning
from airflow_cdc_provider.engine.errors import ForeignTable
from tests.conftest import Databases
from tests.pipelines import PipelineUnderTest
from tests.test_repairs import LOST, ROWS, TABLE, assert_healed

FORGET = "DELETE FROM airflow_cdc.pipelines"


@pytest.fixture
def pipeline(databases: Databases, tmp_path: Path) -> PipelineUnderTest:
    """A pipeline of ``public.t`` whose snapshot is done."""
    under_test = PipelineUnderTest(tmp_path, databases, ["public.t"])
    under_test.source(TABLE, ROWS)
    under_test.provision()
    under_test.copy()
    under_test.apply()
    return under_test


def test_what_is_left_of_a_record_does_not_count(pipeline: PipelineUnderTest) -> None:
    """Its chunks were read for another slot: counted as finished, they would hide what was written in between."""
    pipeline.target(FORGET)
    pipeline.source(*LOST)
    provisioning.start_over(pipeline.pipeline, takeover=False)
    assert len(pipeline.record.unfinished) == len(pipeline.record.chunks) == 1
    pipeline.copy()
    assert_healed(pipeline)


def test_what_is_left_of_a_record_vouches_for_no_rows(pipeline: PipelineUnderTest) -> None:
    """Without the state as well, targets with rows are not taken for ours; emptied, they are filled anew."""
    pipeline.target(FORGET)
    pipeline.source(*LOST, f"SELECT pg_drop_replication_slot('{pipeline.pipeline.source.slot}')")
    (pipeline.state / "ledger.json").unlink()
    with pytest.raises(ForeignTable, match=r"public\.t exists and has rows"):
        pipeline.provision()
    pipeline.target("TRUNCATE public.t")
    pipeline.provision()
    pipeline.copy()
    assert_healed(pipeline)
