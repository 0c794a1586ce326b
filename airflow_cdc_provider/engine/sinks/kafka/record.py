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
from airflow_cdc_provider.engine.sinks.kafka.target_topics import TargetTopics, last_recorded_lsn
from airflow_cdc_provider.engine.sinks.kafka.transactions import Batch, Overtaken, Unsure, Writer, end_all
from airflow_cdc_provider.engine.sinks.record_log.append_only import AppendOnly
from airflow_cdc_provider.engine.sinks.record_log.record import ChangesRecord, Commit
from airflow_cdc_provider.engine.sinks.record_log.record_contents import Change, Contents


@dataclass(frozen=True)
class KafkaRecord(ChangesRecord, AppendOnly):
    """The commit record of a Kafka sink, see :class:`.CommitRecord`.

    :param part: the part of the run; parts write at the same time.
    """

    settings: KafkaSettings
    pipeline: str
    part: str = ""
    mode: Literal["mirror", "changelog"] = "changelog"

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the sink."""
        return Cluster(self.settings.brokers, self.settings.properties)

    @property
    def place(self) -> str:
        """Return the brokers, for messages."""
        return self.settings.place

    @property
    def journal(self) -> Journal:
        """Return the topic of the commit record."""
        return Journal(self.cluster, self.pipeline)

    @property
    def staging(self) -> Staging:
        """Return the staging topic."""
        return Staging(self.cluster, self.pipeline)

    @property
    def topics(self) -> TargetTopics:
        """Return the topics of the targets."""
        return TargetTopics(self.settings, self.pipeline)

    def identity(self) -> Mapping[str, Any]:
        """Return the cluster's id, which is assigned when the cluster is created."""
        return {"cluster": self.cluster.id()}

    def _current(self) -> Contents | None:
        return self.journal.contents()

    def _others(self) -> Iterable[tuple[str, Contents]]:
        for topic in self.cluster.topics():
            pipeline = topic.removeprefix(PREFIX)
            if topic.startswith(PREFIX) and not topic.endswith(SUFFIX) and pipeline != self.pipeline:
                yield pipeline, Journal(self.cluster, pipeline).others() or {}

    def _require_store(self) -> None:
        """Refuse brokers on which no transaction can be started."""
        self.probe().end()

    def _begin(self, change: Change, what: str) -> bool:
        self.journal.create(self.settings.replicas)
        self.staging.create(self.settings.replicas)

        def decide(contents: Contents | None) -> Commit | None:
            return Commit(change) if contents is None else None

        return self._transact(self._writer(), what, decide) is not None

    def _append(self, epoch: int | None, what: str, decide: Callable[[Contents], Commit | None]) -> Contents | None:
        """Append an entry, see :meth:`.ChangesRecord._append`.

        Open transactions of other parts are ended first, so that the append does not wait for them. They are ended
        again afterwards, because a part may be about to commit a decision based on the earlier state.
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
        """Commit messages and a decision under the part's own ``transactional.id``.

        Decisions of parts that write at the same time do not depend on each other.
        """
        self._join(epoch)
        return self._transact(
            self._writer(self.part), what, lambda contents: decide(self._owned(contents, epoch)), data
        )

    def _join(self, epoch: int) -> None:
        """Add the part's ``transactional.id`` to the record, so that its transactions are ended when the epoch is
        taken.
        """

        def decide(contents: Contents) -> Commit | None:
            known = self.part in contents.get("writers", {})
            return None if known else Commit(Change({"writers": {self.part: True}}))

        if self.part and decide(self._contents(epoch)) is not None:
            # Transactions of other parts must not be ended here, because parts would abort each other.
            self._transact(self._writer(), f"{self.part} writes", lambda contents: decide(self._owned(contents, epoch)))

    def _writer(self, part: str = "") -> Writer:
        name = f"{PREFIX}{self.pipeline}" + (f".{part}" if part else "")
        return Writer(self.cluster, name, self.settings.transaction_timeout)

    def probe(self) -> Writer:
        """Return a writer that no run uses, to check whether transactions can be started."""
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
        """Decide by the contents of the record, and commit the decision.

        :param what: description of the commit, for people who read the topic.
        :returns: the new contents of the record; ``None`` if there was nothing to commit.
        """
        late, unsure = 0, None
        with writer.locked():
            for tried in range(_TRIES):
                if tried:
                    # Otherwise two writers could keep taking the id from each other.
                    time.sleep(random.uniform(0, _PAUSE))
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
                    unsure = e  # the record will show whether it was committed
                else:
                    # A transaction is committed slightly before readers see it, so wait until all of them see it.
                    return self.journal.contents(self.settings.transaction_timeout + _MARGIN)
        if unsure is not None:
            raise self.cluster.unreachable(
                f"transactions under {writer.id} do not end, after {_TRIES} attempts: {unsure}"
            ) from unsure
        raise StreamFailed(
            f"could not commit because other processes have taken {writer.id} {_TRIES} times",
            "Make sure that no two runs of the pipeline have the same part; then start again.",
        )

    def _require_apart(self, targets: Sequence[Target]) -> None:
        self.topics.require_apart(targets)

    def _has(self, contents: Contents, target: Target) -> bool:
        tables = contents.get("tables", {})
        own = self.topics.name(target)
        return any(head["topic"] == own for label, head in contents.get("topics", {}).items() if label in tables)

    def _check_target(self, target: Target, recorded: Target | None, ours: bool, start: LogPosition | None) -> None:
        topics = self.topics
        topics.format.require(target)
        if recorded is not None:
            topics.require_before(target, last_recorded_lsn(self._current() or {}, target), start)
        elif ours:
            topics.require_before(target, topics.last_event(target), start)
        else:
            topics.require_ours(target)

    def _create(self, targets: Sequence[Target]) -> None:
        self.topics.create(targets)

    def _described(self, contents: Contents, targets: Sequence[Target], ours: Collection[str]) -> Change:
        return self.topics.described(contents, targets, ours)

    def missing(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        """Return the targets whose topics are gone or have been recreated, and so have lost their messages."""
        return self.topics.missing(self._current() or {}, targets)

    def take_epoch(self, owner: str, at_least: int = 0) -> int:
        """Take the epoch, and create the staging topic if it is missing."""
        self.journal.require()
        epoch = super().take_epoch(owner, at_least)
        self.staging.create(self.settings.replicas)
        return epoch

    def end_sessions(self) -> None:
        """End open transactions, so that their writers cannot continue."""
        writers = [self._writer(self.part)]
        if not self.part:
            writers += self._writers(self._current() or {})
        for writer in writers:
            writer.leave()
        end_all(writers)


_TRIES = 10


_PAUSE = 0.5  # maximum number of seconds before another attempt


_MARGIN = 10.0  # seconds after its timeout within which the brokers end a transaction
