"""Finds the page of a job's Spark application: its own UI while it is alive, later the history server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from urllib.parse import urlsplit

from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat
from airflow_cdc_provider.engine.state.submission import Submission, read

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>No Spark UI</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 15vh auto; max-width: 40rem; padding: 0 1rem; }}
</style>
<h1>No Spark UI</h1>
<p>{reason}</p>
<p>{solution}</p>
</html>
"""


@dataclass(frozen=True)
class SparkJob:
    """The known information on a job.

    :param submission: ``None`` if the state no longer has it.
    :param beat: its last heartbeat; ``None`` before the first one, and if a later job of its part has overwritten it.
    :param linked: id of its Spark application from the link, if the link has it.
    """

    submission: Submission | None
    beat: Heartbeat | None
    linked: str | None = None

    @property
    def application(self) -> str | None:
        """Return the id of its Spark application."""
        return next(
            (known.application for known in (self.beat, self.submission) if known and known.application), self.linked
        )

    @property
    def alive(self) -> bool:
        """Return whether its Spark application counts as alive."""
        return self.beat is not None and self.beat.alive

    @property
    def confirms_host(self) -> bool:
        """Return whether its submission confirms the host of the web UI that the job reports."""
        host = urlsplit((self.beat and self.beat.ui) or "").hostname
        return host is not None and self.submission is not None and host in self.submission.hosts

    @property
    def is_starting(self) -> bool:
        """Return whether it has no Spark application yet."""
        waits = self.beat is None and self.submission is not None and self.submission.ended_at is None
        return self.application is None and (self.alive or waits)


def find_job(state: State, beats: Iterable[Heartbeat], submission: str, linked: str | None) -> SparkJob:
    """Look up a job by the id of its submission.

    :param beats: the heartbeats in the state.
    """
    return SparkJob(
        read(state, submission), next((beat for beat in beats if beat.submission == submission), None), linked
    )


def address_of(job: SparkJob, history_server: str) -> str | None:
    """Return the address of a job's page, or ``None`` if there is none.

    :param history_server: address of the history server; empty for none.
    """
    if job.alive and job.beat is not None and _is_web(job.beat.ui) and job.confirms_host:
        return job.beat.ui
    if job.application is not None and _is_web(history_server):
        return f"{history_server.rstrip('/')}/history/{job.application}/"
    return None


def explain(job: SparkJob) -> tuple[str, str]:
    """Return why there is no page of a job, and a remedy."""
    if job.is_starting:
        return "The Spark application of this job has not started yet.", "Reload this page in some seconds."
    if job.application is None:
        return (
            "The Spark application of this job is unknown.",
            "Either the job ended before it had started one, or it ended so long ago that the pipeline's state no"
            " longer has it. See the log of the task for the output of the job.",
        )
    if job.alive and job.beat is not None and _is_web(job.beat.ui):
        return (
            f"The Spark application {job.application} reports that its UI is at {job.beat.ui}.",
            "This address is not confirmed: the job's submission does not name that host, for example because a"
            " cluster runs the driver. Open it only if you know it.",
        )
    if job.alive:
        return (
            f"The Spark application {job.application} is running without a UI.",
            "Remove spark.ui.enabled=false from the Spark configuration of the pipeline or of the task.",
        )
    return (
        f"The Spark application {job.application} has ended, so its UI is gone.",
        "To see ended applications, run a Spark history server, let the jobs write event logs for it"
        " (spark.eventLog.enabled and spark.eventLog.dir), and set [airflow_cdc] spark_history_server to its address.",
    )


def page(reason: str, solution: str) -> str:
    """Return a page that is shown instead of Spark's."""
    return _PAGE.format(reason=escape(reason), solution=escape(solution))


def _is_web(address: str | None) -> bool:
    """Return whether a browser may be redirected to an address; never to ``javascript:`` and similar schemes."""
    if not address:
        return False
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname)
