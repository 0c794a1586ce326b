"""The position at which a pipeline over topics continues, by record and checkpoint: a model with crashes, restores."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_cdc_provider.engine.core.errors import ConfigError, GateClosed
from airflow_cdc_provider.engine.core.record import Record
from airflow_cdc_provider.engine.kafka.topic import Topic
from airflow_cdc_provider.engine.sources.kafka.position import (
    FoundCheckpoint,
    RecordedTopics,
    continues_checkpoint,
    most_advanced,
    with_truncates,
)
from airflow_cdc_provider.engine.sources.kafka.topics import behind, reached, with_all

POSITION = RecordedTopics(0, "cluster", {"t": {"0": 0}}, {"t": {"0": 0}}, {"t": "id"}, {}, False, None, 0)
CRASHES = ("batch", "crash when planned", "crash between sinks", "crash when committed")
STEPS = (*CRASHES, "lose", "copy", "restore checkpoint", "restore sinks", "restore a sink")


@dataclass
class Sink:
    """The record of a sink, and its messages."""

    position: RecordedTopics
    messages: list[int] = field(default_factory=list)

    @property
    def offset(self) -> int:
        return self.position.offsets["t"]["0"]

    def commit(self, unit: int, offset: int, messages: list[int], checkpoint: str, base: int) -> None:
        """Commit a unit like :meth:`.Sink.commit`."""
        if self.position.applied >= unit:
            return
        assert self.position.applied == unit - 1, "the sink refuses the unit"
        noted = RecordedTopics.noted({"t": {"0": offset}}, checkpoint, base, {"t": "id"})
        self.position = replace(self.position, applied=unit, **noted)
        self.messages += messages


@dataclass
class Checkpoint:
    """A checkpoint of Spark: offsets of planned batches, which of these are committed, and the state."""

    id: str
    start: int
    planned: list[int] = field(default_factory=list)
    committed: int = -1
    state: list[int] = field(default_factory=list)

    def found(self, position: RecordedTopics) -> FoundCheckpoint:
        last = position.applied - position.base - 1
        known = self.id == position.checkpoint and 0 <= last < len(self.planned)
        offsets = {"t": {"0": self.planned[last]}} if known else None
        return FoundCheckpoint(self.id, self.committed, len(self.planned) - 1, offsets)


class Model:
    """A pipeline with one topic, to which messages are written all the time."""

    def __init__(self, stateful: bool, sinks: int) -> None:
        self.sinks = [Sink(replace(POSITION, stateful=stateful)) for _ in range(sinks)]
        self.checkpoint: Checkpoint | None = None
        self.topic = 0
        self.made = 0
        self.copies: tuple[Checkpoint | None, list[Sink]] | None = None

    def run(self, crash: str | None) -> None:
        """Start, and process a batch; the process may end in between."""
        positions = [sink.position for sink in self.sinks]
        first = most_advanced(positions)
        found = FoundCheckpoint(None) if self.checkpoint is None else self.checkpoint.found(first)
        base = first.base
        if not continues_checkpoint(positions, found, "there"):
            self.made += 1
            base = first.applied
            self.checkpoint = Checkpoint(str(self.made), self.sinks[0].offset)
        assert self.checkpoint is not None
        if len(self.checkpoint.planned) - 1 > self.checkpoint.committed:
            self._batch(self.checkpoint, base, None)
        self.topic += 3
        self.checkpoint.planned.append(self.topic)
        if crash != "crash when planned":
            self._batch(self.checkpoint, base, crash)

    def _batch(self, checkpoint: Checkpoint, base: int, crash: str | None) -> None:
        batch = checkpoint.committed + 1
        begin = checkpoint.planned[batch - 1] if batch else checkpoint.start
        messages = list(range(begin, checkpoint.planned[batch]))
        state = [*checkpoint.state, *messages]
        for sink in self.sinks[:1] if crash == "crash between sinks" else self.sinks:
            sink.commit(base + batch + 1, checkpoint.planned[batch], messages, checkpoint.id, base)
            if sink.position.stateful and sink.position.applied == base + batch + 1:
                assert state == sink.messages, "the state does not know what the sink has"
        if crash is None:
            checkpoint.committed, checkpoint.state = batch, state

    def step(self, name: str) -> None:
        if name == "lose":
            self.checkpoint = None
        elif name == "copy":
            self.copies = deepcopy((self.checkpoint, self.sinks))
        elif not name.startswith("restore"):
            self.run(name if name.startswith("crash") else None)
        elif self.copies:
            checkpoint, sinks = deepcopy(self.copies)
            if name == "restore checkpoint":
                self.checkpoint = checkpoint
            else:
                self.sinks[-1 if name == "restore a sink" else 0 :] = sinks[-1 if name == "restore a sink" else 0 :]
        for sink in self.sinks:
            assert sink.messages == list(range(sink.offset)), name


@pytest.mark.lengthy
@settings(max_examples=600)
@given(st.lists(st.sampled_from(STEPS), max_size=14))
def test_without_state_every_message_is_brought_in_once_whatever_is_lost_or_restored(steps: list[str]) -> None:
    model = Model(stateful=False, sinks=1)
    for step in steps:
        model.step(step)


@pytest.mark.lengthy
@settings(max_examples=600)
@given(st.booleans(), st.integers(1, 2), st.lists(st.sampled_from(STEPS), max_size=14))
def test_it_goes_on_only_where_state_and_sinks_know_the_same(stateful: bool, sinks: int, steps: list[str]) -> None:
    model = Model(stateful, sinks)
    for step in steps:
        try:
            model.step(step)
        except GateClosed:
            return


@given(st.booleans(), st.integers(1, 2), st.lists(st.sampled_from(CRASHES), max_size=12))
def test_crashes_alone_never_stop_it(stateful: bool, sinks: int, steps: list[str]) -> None:
    model = Model(stateful, sinks)
    for step in steps:
        model.step(step)


def test_a_source_that_cannot_go_on_is_refused() -> None:
    position = replace(POSITION, offsets={"t": {"0": 5}})
    topic, at = Topic("t", "id", 1), {"t": {"0": 5}}
    position.require_source("cluster", [topic], {"t": {"0": 0}}, at)
    for cluster, topics, beginnings, ends, said in (
        ("other", [topic], at, at, "cluster other"),
        ("cluster", [], {}, {}, "no longer exists"),
        ("cluster", [replace(topic, id="new")], at, at, "has been recreated"),
        ("cluster", [topic], {"t": {"0": 6}}, {"t": {"0": 9}}, "begins at offset 6"),
        ("cluster", [topic], {"t": {"0": 0}}, {"t": {"0": 4}}, "ends at offset 4"),
    ):
        with pytest.raises(GateClosed, match=said):
            position.require_source(cluster, topics, beginnings, ends)


def test_the_record_of_another_kind_of_source_is_refused() -> None:
    record = Record(1, 0, 0.0, {"source": "postgres"}, (), ())
    with pytest.raises(ConfigError, match="provisioned with 'postgres'"):
        RecordedTopics.of(record)


def test_offsets_are_held_against_each_other() -> None:
    offsets, ends = {"t": {"0": 5}}, {"t": {"0": 7, "1": 3}, "u": {"0": 0}}
    assert behind(offsets, ends) == 5
    assert not reached(offsets, ends)
    assert reached({"t": {"0": 7, "1": 3}}, ends)
    assert with_all(offsets, [Topic("t", "", 2)], lambda topic, partition: -2) == {"t": {"0": 5, "1": -2}}


def test_a_unit_looks_as_far_as_the_truncate_that_it_begins_with() -> None:
    offsets = {"t": {"0": 5, "1": 7}, "u": {"0": 1}}
    assert with_truncates(offsets, {}) == offsets
    assert with_truncates(offsets, {"t": {"0": 9, "1": 3, "2": 4}}) == {"t": {"0": 9, "1": 7, "2": 4}, "u": {"0": 1}}
