"""The facts about a Postgres source in a commit record."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import Lsn
from airflow_cdc_provider.engine.postgres.server_identity import ServerIdentity
from airflow_cdc_provider.engine.postgres.slots import SlotIdentity
from airflow_cdc_provider.engine.sources.postgres.recorded_slot import RecordedSlot

oids = st.integers(0, (1 << 32) - 1)
identities = st.builds(SlotIdentity, st.text(), oids, oids, st.text(), oids, oids)
positions = st.integers(0, (1 << 64) - 1).map(Lsn)


@given(st.builds(RecordedSlot, identities, st.booleans(), positions, st.dictionaries(oids, st.text())))
def test_what_is_noted_comes_back(slot: RecordedSlot) -> None:
    noted = json.loads(json.dumps({**slot.to_notes(), "source": "postgres", "mode": "mirror"}))
    assert RecordedSlot.of(noted) == slot
    assert RecordedSlot.of(noted).origin == ServerIdentity.of(noted)


def test_another_kind_of_source_has_noted_something_else() -> None:
    with pytest.raises(ConfigError, match="provisioned with 'kafka'"):
        RecordedSlot.of({"source": "kafka"})
