"""The trigger of watched assets: changes that a stream reports while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow_support import write_pipeline

# isort: split
from airflow_cdc_provider import applied_lsn, table_asset, view_asset
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner, write_heartbeat
from airflow_cdc_provider.triggers.changes import ChangesTrigger
from tests.support.patience import SECONDS
from tests.support.watching import Store, again

pytestmark = pytest.mark.airflow

STREAM = Heartbeat(Owner("elsewhere", 7, 1), "stream", 3, 0.0, False, {})


def lsns_of_events(directory: Path, beats: Iterable[Heartbeat], **of: Any) -> list[str]:
    """Return the LSNs of the events after each heartbeat was seen; before each one the triggerer restarts."""
    file, state, store = write_pipeline(directory), State(f"{directory}/state"), Store()
    found = []

    async def watch() -> None:
        trigger = again(ChangesTrigger(pipeline=str(file), interval=0.05, **of))
        trigger.asset_state_store = store
        async for event in trigger.run():
            assert event.payload["pipeline"] == "shop"
            found.append(event.payload["applied_lsn"])

    async def watch_until(seen: str) -> None:
        watching = asyncio.create_task(watch())
        while store.get("seen", {}).get("applied_lsn") != seen:
            await asyncio.sleep(0.02)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def scenario() -> None:
        await watch_until("")
        for beat in beats:
            write_heartbeat(state, beat)
            await watch_until(beat.progress["applied_lsn"])

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    return found


def test_an_event_for_a_table_when_its_count_has_grown_or_a_job_may_have_died(tmp_path: Path) -> None:
    def beat(job: Heartbeat, applied: str, **tables: int) -> Heartbeat:
        changed = {f"public.{table}": count for table, count in tables.items()}
        return replace(job, progress={"applied_lsn": applied, "tables": changed})

    second, third = replace(STREAM, epoch=4), replace(STREAM, epoch=5)
    beats = [
        beat(STREAM, "0/1", other=9),
        beat(STREAM, "0/2", other=9, orders=5),
        beat(STREAM, "0/3", other=10, orders=5),
        beat(second, "0/4"),  # the first job has not reported its end
        beat(replace(second, ended=True), "0/5"),
        beat(third, "0/6"),
        beat(third, "0/7", orders=5),
    ]
    assert lsns_of_events(tmp_path, beats, table="public.orders") == ["0/2", "0/4", "0/7"]


def test_an_event_for_a_view_when_a_unit_has_affected_it(tmp_path: Path) -> None:
    def beat(applied: str, units: int, as_of: str, behind: bool = False, job: Heartbeat = STREAM) -> Heartbeat:
        other = {"view": "dwd.other", "units": int(applied[-1]), "as_of": applied, "behind": False}
        wide = {"view": "dwd.wide", "units": units, "as_of": as_of, "behind": behind}
        return replace(job, progress={"applied_lsn": applied, "tables": {}, "views": [other, wide]})

    beats = [
        beat("0/1", 1, "0/1"),  # the view was built
        beat("0/2", 1, "0/2"),
        beat("0/3", 2, "0/3", job=replace(STREAM, epoch=4)),
        beat("0/4", 2, "0/4", job=replace(STREAM, epoch=5)),
    ]
    assert lsns_of_events(tmp_path, beats, view="dwd.wide") == ["0/1", "0/3"]


def test_a_view_that_is_behind_has_its_own_position(tmp_path: Path) -> None:
    shown = {"view": "dwd.wide", "units": 3, "as_of": "0/5", "behind": True}
    report = replace(STREAM, progress={"applied_lsn": "0/9", "views": [shown, {**shown, "as_of": "0/4"}]})
    write_heartbeat(State(f"{tmp_path}/state"), report)
    trigger = ChangesTrigger(pipeline=str(write_pipeline(tmp_path)), view="dwd.wide")

    name, seen = trigger._look()

    assert (name, seen is not None and seen.applied_lsn) == ("shop", "0/4")


def test_watched_assets_have_a_watcher_and_their_events_the_same_position() -> None:
    for made in (table_asset("shop", "public.orders", watch="/f", interval=5), view_asset("shop", "a.b", watch="/f")):
        (watcher,) = made.watchers
        assert isinstance(watcher.trigger, ChangesTrigger)
    assert table_asset("shop", "public.orders").watchers == []
    of_task = SimpleNamespace(extra={"applied_lsn": "0/1", "pipeline": "shop"})
    of_watcher = SimpleNamespace(extra={"from_trigger": True, "payload": {"applied_lsn": "0/2"}})
    assert [applied_lsn(of_task), applied_lsn(of_watcher)] == ["0/1", "0/2"]
    with pytest.raises(ValueError, match="either table or view"):
        ChangesTrigger(pipeline="/f")
