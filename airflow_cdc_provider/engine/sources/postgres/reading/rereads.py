"""Reads tables again: by a request to the live stream, in this process, or all of them from a new slot on."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.runs.commit_records import existing_record
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.provision import provisioning
from airflow_cdc_provider.engine.sources.postgres.reading import reread, reread_requests
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import PATIENCE_SECONDS, Barriers


class PostgresRereads:
    """See :class:`.Rereads`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def check(self, labels: Sequence[str], where: str | None) -> None:
        """See :meth:`.Rereads.check`."""
        for branch in self.pipeline.branches:
            for label in labels:
                reread.check(branch, existing_record(branch), label, where)

    def request(self, labels: Sequence[str], where: str | None, name: str | None) -> str:
        """See :meth:`.Rereads.request`."""
        return reread_requests.request(self.pipeline, list(labels), where, name)

    def read(self, run: Run, labels: Sequence[str], where: str | None) -> dict[str, int]:
        """See :meth:`.Rereads.read`; with several sinks, the largest number of rows counts."""
        written: dict[str, int] = {}
        for branch in run.branches:
            barriers = Barriers(PATIENCE_SECONDS)
            for label in labels:
                written[label] = max(written.get(label, 0), reread.read_again(branch, label, barriers, where))
        return written

    def start_over(self, takeover: bool) -> int:
        """See :meth:`.Rereads.start_over`: publication and slot."""
        return provisioning.start_over(self.pipeline, takeover)
