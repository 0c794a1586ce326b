"""The commit record of a Kafka sink: entries of a topic, written in transactions that fence earlier runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from airflow_cdc_provider.engine.core.errors import StreamFailed
from airflow_cdc_provider.engine.core.lsn import LogPosition
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.kafka.cluster import Cluster
from airflow_cdc_provider.engine.sinks.kafka.record_topic import PREFIX, Journal, written
from airflow_cdc_provider.engine.sinks.kafka.settings import KafkaSettings
from airflow_cdc_provider.engine.sinks.kafka.staging_topic import SUFFIX, Staging
from airflow_cdc_provider.engine.sinks.kafka.target_topics import TargetTopics, last_told
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch, Overtaken, Unsure, Writer, end_all
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly
from airflow_cdc_provider.engine.sinks.record_log.record import ChangesRecord, Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents


@dataclass(frozen=True)
class KafkaRecord(ChangesRecord, AppendOnly):
    """See :class:`.CommitRecord`.

    :param part: of the run, which writes at the same time as others.
    """

    settings: KafkaSettings
    pipeline: str
    part: str = ""
    mode: Literal["mirror", "changelog"] = "changelog"

    @property
    def cluster(self) -> Cluster:
        """The cluster that the settings name."""
        return Cluster(self.settings.brokers, self.settings.properties)

    @property
    def place(self) -> str:
        """See :attr:`.ChangesRecord.place`."""
        return self.settings.place

    @property
    def journal(self) -> Journal:
        """The record's topic."""
        return Journal(self.cluster, self.pipeline)

    @property
    def staging(self) -> Staging:
        """The topic of what is staged."""
        return Staging(self.cluster, self.pipeline)

    @property
    def topics(self) -> TargetTopics:
        """The topics of the targets."""
        return TargetTopics(self.settings, self.pipeline)

    def identity(self) -> Mapping[str, Any]:
        """See :meth:`.contract.Sink.identity`: the number that the cluster was given when it was made."""
        return {"cluster": self.cluster.id()}

    def _current(self) -> Contents | None:
        return self.journal.contents()

    def _others(self) -> Iterable[tuple[str, Contents]]:
        for topic in self.cluster.topics():
            pipeline = topic.removeprefix(PREFIX)
            if topic.startswith(PREFIX) and not topic.endswith(SUFFIX) and pipeline != self.pipeline:
                yield pipeline, Journal(self.cluster, pipeline).others() or {}

    def _require_store(self) -> None:
        """See :meth:`.ChangesRecord._require_store`: brokers with which no transaction can be begun are refused."""
        self.probe().end()

    def _begin(self, change: Change, what: str) -> bool:
        self.journal.create(self.settings.replicas)
        self.staging.create(self.settings.replicas)

        def decide(contents: Contents | None) -> Commit | None:
            return Commit(change) if contents is None else None

        return self._transact(self._writer(), what, decide) is not None

    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """See :meth:`.ChangesRecord._append`.

        What other parts have open is ended before, so that nothing is waited for, and afterwards, when who has decided
        by what was so before may be about to commit.
        """
        end_all(self._writers(self._contents(epoch)))
        appended = self._transact(self._writer(), what, lambda contents: decide(self._owned(contents, epoch)))
        if appended is not None:
            end_all(self._writers(appended))
        return appended

    def _commit(
        self,
        epoch: int,
        what: str,
        decide: Callable[[Contents], Commit | None],
        data: Callable[[], Iterable[Batch]],
    ) -> Contents | None:
        """Commit messages, and what has been decided, under the part's own ``transactional.id``.

        Parts that write at the same time decide what does not depend on the others.
        """
        self._join(epoch)
        return self._transact(
            self._writer(self.part), what, lambda contents: decide(self._owned(contents, epoch)), data
        )

    def _join(self, epoch: int) -> None:
        """Have the part's ``transactional.id`` in the record, so that who takes the epoch ends what is open there."""

        def decide(contents: Contents) -> Commit | None:
            known = self.part in contents.get("writers", {})
            return None if known else Commit(Change({"writers": {self.part: True}}))

        if self.part and decide(self._contents(epoch)) is not None:
            # Nothing of other parts has to end for it: those that write at the same time would abort each other's.
            self._transact(self._writer(), f"{self.part} writes", lambda contents: decide(self._owned(contents, epoch)))

    def _writer(self, part: str = "") -> Writer:
        name = f"{PREFIX}{self.pipeline}" + (f".{part}" if part else "")
        return Writer(self.cluster, name, self.settings.transaction_timeout)

    def probe(self) -> Writer:
        """One that no run has, to see whether transactions can be begun."""
        return self._writer("preflight")

    def _writers(self, contents: Contents) -> list[Writer]:
        return [self._writer(part) for part in contents.get("writers", {})]

    def _transact(
        self,
        writer: Writer,
        what: str,
        decide: Callable[[Contents | None], Commit | None],
        data: Callable[[], Iterable[Batch]] = tuple,
    ) -> Contents | None:
        """Decide by what the record holds, and commit that.

        :param what: is done, for people who read the topic.
        :returns: what the record holds afterwards; ``None`` when there was nothing to commit.
        """
        late, unsure = 0, None
        with writer.alone():
            for tried in range(_TRIES):
                if tried:
                    time.sleep(random.uniform(0, _PAUSE))  # or two would take it from each other in step
                writer.take()
                contents = self.journal.contents(self.settings.transaction_timeout + _MARGIN)
                commit = decide(contents)
                if commit is None:
                    return None
                try:
                    writer.commit(self.journal, what, written(commit.now, contents or {}), data())
                except Overtaken as e:
                    late += e.seconds > writer.timeout
                    if late > 1:
                        raise writer.too_long(e.seconds) from e
                except Unsure as e:
                    unsure = e  # what the record says tells how it has ended
                else:
                    # A transaction is committed a moment before readers are shown it: then they are, all of them.
                    return self.journal.contents(self.settings.transaction_timeout + _MARGIN)
        if unsure is not None:
            raise self.cluster.unreachable(
                f"transactions under {writer.id} do not come to an end, after {_TRIES} tries: {unsure}"
            ) from unsure
        raise StreamFailed(
            f"others have taken {writer.id} {_TRIES} times while this run was about to commit",
            "See that no two runs of the pipeline have the same part; then start again.",
        )

    def _require_apart(self, targets: Sequence[Target]) -> None:
        self.topics.require_apart(targets)

    def _has(self, contents: Contents, target: Target) -> bool:
        tables = contents.get("tables", {})
        own = self.topics.name(target)
        return any(told["topic"] == own for label, told in contents.get("topics", {}).items() if label in tables)

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        topics = self.topics
        topics.format.require(target)
        if recorded is not None:
            topics.require_before(target, last_told(self._current() or {}, target), start)
        elif ours:
            topics.require_before(target, topics.last_event(target), start)
        else:
            topics.require_ours(target)

    def _create(self, targets: Sequence[Target]) -> None:
        self.topics.create(targets)

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        return self.topics.described(contents, targets, ours)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """See :meth:`.contract.Sink.missing`; a topic that was made anew has lost its messages as well."""
        return self.topics.missing(self._current() or {}, targets)

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """See :meth:`.contract.Sink.take_epoch`."""
        self.journal.require()
        epoch = super().take_epoch(owner, at_least)
        self.staging.create(self.settings.replicas)
        return epoch

    def end_sessions(self) -> None:
        """See :meth:`.contract.Sink.end_sessions`: transactions that are open are ended, and none goes on."""
        writers = [self._writer(self.part)]
        if not self.part:
            writers += self._writers(self._current() or {})
        for writer in writers:
            writer.leave()
        end_all(writers)


_TRIES = 10


_PAUSE = 0.5  # seconds at most, before another try


_MARGIN = 10.0  # seconds after its timeout in which the brokers have ended a transaction
