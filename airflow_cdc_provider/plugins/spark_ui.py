"""Where Spark shows the application of a job: in its own UI while it lives, then on the history server."""

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
    """What is known of a job.

    :param submission: ``None`` when the state has forgotten it.
    :param beat: its last heartbeat; ``None`` before the first, and when a later job of its part has overwritten it.
    :param told: id of its Spark application as the link says it, ``None`` if it does not.
    """

    submission: Submission | None
    beat: Heartbeat | None
    told: str | None = None

    @property
    def application(self) -> str | None:
        """Id of its Spark application."""
        return next(
            (known.application for known in (self.beat, self.submission) if known and known.application), self.told
        )

    @property
    def alive(self) -> bool:
        """Whether its Spark application must be taken for alive."""
        return self.beat is not None and self.beat.alive

    @property
    def vouched(self) -> bool:
        """Whether its web UI is on the host that its submission names, and not only where the job says."""
        host = urlsplit((self.beat and self.beat.ui) or "").hostname
        return host is not None and self.submission is not None and host in self.submission.hosts

    @property
    def begins(self) -> bool:
        """Whether it has no Spark application yet."""
        waits = self.beat is None and self.submission is not None and self.submission.ended_at is None
        return self.application is None and (self.alive or waits)


def find_job(state: State, beats: Iterable[Heartbeat], submission: str, told: str | None) -> SparkJob:
    """Look up a job by the id of its submission.

    :param beats: the heartbeats in the state.
    """
    return SparkJob(
        read(state, submission), next((beat for beat in beats if beat.submission == submission), None), told
    )


def address_of(job: SparkJob, history_server: str) -> str | None:
    """Where to look at a job; ``None`` when there is nothing to be seen.

    :param history_server: its address; empty for none.
    """
    if job.alive and job.beat is not None and _is_web(job.beat.ui) and job.vouched:
        return job.beat.ui
    if job.application is not None and _is_web(history_server):
        return f"{history_server.rstrip('/')}/history/{job.application}/"
    return None


def explain(job: SparkJob) -> tuple[str, str]:
    """Why there is nothing to be seen of a job, and what to do about it."""
    if job.begins:
        return "The Spark application of this job has not begun yet.", "Load this page again in some seconds."
    if job.application is None:
        return (
            "It is not known which Spark application this job was.",
            "Either it ended before it had begun one, or it ended so long ago that the pipeline's state has forgotten"
            " it. What it has printed stands in the log of the task.",
        )
    if job.alive and job.beat is not None and _is_web(job.beat.ui):
        return (
            f"The Spark application {job.application} says that its UI is at {job.beat.ui}.",
            "Nobody has vouched for that address: the job's submission names no such host, as for a driver that a"
            " cluster runs. Open it if you know it.",
        )
    if job.alive:
        return (
            f"The Spark application {job.application} is running without a UI.",
            "Leave out spark.ui.enabled=false in the Spark configuration of the pipeline or of the task.",
        )
    return (
        f"The Spark application {job.application} has ended, and its UI with it.",
        "To look at ended ones, run a Spark history server, let the jobs write event logs for it"
        " (spark.eventLog.enabled and spark.eventLog.dir), and name it in [airflow_cdc] spark_history_server.",
    )


def page(reason: str, solution: str) -> str:
    """A page in the place of Spark's."""
    return _PAGE.format(reason=escape(reason), solution=escape(solution))


def _is_web(address: str | None) -> bool:
    """Whether a browser may be sent to an address: never to ``javascript:`` and the like."""
    if not address:
        return False
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname)
