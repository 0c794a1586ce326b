"""Little work, which the process of a task does itself instead of submitting a Spark job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.engine.core.errors import CdcError, Fenced, Retry, SecondWriter

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline

T = TypeVar("T")


def work_locally(
    pipeline: Pipeline, work: Callable[[Pipeline], dict[str, Any]], command: str, log: Logger
) -> dict[str, Any] | None:
    """Run a command in this process, once; it repeats nothing, since a job can wait without occupying a worker.

    :param work: runs the command on the pipeline.
    :param command: the command's name.
    :returns: its result; ``None`` if an error may pass, so that a job has to continue the work.
    :raises AirflowException: if a signal has ended the command before its work was done.
    :raises CdcError: if it has failed for good, or another run is at work.
    """
    from airflow_cdc_provider.engine.pipeline.restart_strategy import Restart
    from airflow_cdc_provider.engine.runs.run_errors import stop_requested
    from airflow_cdc_provider.engine.state.files import State
    from airflow_cdc_provider.engine.state.heartbeat import Owner
    from airflow_cdc_provider.engine.state.submission import is_finished

    once = replace(pipeline, stream=replace(pipeline.stream, restart=Restart(strategy="none")))
    result = unless_it_may_pass(lambda: work(once), command, log)
    if result is None:
        return None
    if not is_finished(result) and not stop_requested(State(pipeline.state), Owner.this()):
        raise AirflowException("The task was asked to end before its work was done.")
    log.info("Done without Spark: %s", result)
    return result


def unless_it_may_pass(step: Callable[[], T], command: str, log: Logger) -> T | None:
    """Return what a step returns; ``None`` after an error that may pass, such as an outage."""
    from airflow_cdc_provider.engine.postgres.driver_errors import DRIVER_ERRORS, driver_failure

    try:
        try:
            return step()
        except DRIVER_ERRORS as e:
            raise driver_failure(e, command) from e
    except (SecondWriter, Fenced):
        raise
    except CdcError as e:
        if e.retry is not Retry.RETRY:
            raise
        log.warning("%s. A Spark job does the work, and waits if that is necessary.", e.message)
        return None
