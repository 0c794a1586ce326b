"""The base of operators whose work is a Spark job of the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.engine import errors
from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import CdcError, ExitCode, Retry
from airflow_cdc_provider.hooks.cdc import airflow_failures, failure, load_pipeline
from airflow_cdc_provider.operators.progress import ProgressLog

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.hooks.spark_job import SparkJobHook


# All that the job prints goes to the task's log, where Spark's own chatter would bury it.
QUIET = {"spark.log.level": "WARN"}


class CdcSparkOperator(BaseOperator):
    """Runs a command of the engine as a Spark application, in client mode.

    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param application: the main script, by default that of the engine.
    """

    template_fields: Sequence[str] = ("pipeline", "epoch", "conf")

    command: str
    """The command of the engine, a class attribute of each operator."""

    def __init__(
        self,
        *,
        pipeline: str,
        epoch: int | str,
        spark_conn_id: str = "spark_default",
        conf: Mapping[str, str] | None = None,
        application: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.epoch = epoch
        self.spark_conn_id = spark_conn_id
        self.conf = conf
        self.application = application
        self._job: SparkJobHook | None = None
        self._killed = False

    @abstractmethod
    def command_arguments(self) -> list[str]:
        """The options of the command beside pipeline and epoch."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns what the command returned."""
        from airflow_cdc_provider.engine import commands
        from airflow_cdc_provider.hooks.spark_job import ENGINE_JOB, SparkJobHook, packed_engine

        with airflow_failures(), packed_engine() as archive:
            loaded = load_pipeline(self.pipeline)
            pipeline = loaded.pipeline
            arguments = [self.command, "--pipeline", str(loaded.path), "--epoch", str(self.epoch), "--json"]
            self._job = SparkJobHook(
                self.spark_conn_id,
                name=f"airflow-cdc {pipeline.name} {self.command}",
                application_args=[*arguments, *self.command_arguments()],
                conf={**QUIET, **pipeline.spark.conf, **(self.conf or {})},
                py_files=archive,
                environment=loaded.environment,
            )
            before = _last_error(pipeline)
            if self._killed:
                raise AirflowException("The task was asked to end before its Spark job began.")
            with ProgressLog(partial(commands.status, pipeline), self.log.info):
                exit_code = self._job.run(self.application or str(ENGINE_JOB))
            if exit_code != ExitCode.DONE:
                after = _last_error(pipeline)
                recorded = after if after != before else None
                raise job_failure(exit_code, self._job.result.get("error"), recorded, self._job.output_tail)
            return self._job.result

    def on_kill(self) -> None:
        """End all processes of the job within the five seconds that Airflow grants."""
        self._killed = True
        if self._job is not None:
            self._job.kill()


def job_failure(exit_code: int, reported: object, recorded: Mapping[str, str] | None, output: str) -> AirflowException:
    """The exception for a job that failed.

    :param exit_code: what spark-submit exited with, which is the engine's code if the engine came that far.
    :param reported: the ``error`` object that the job printed, if it did.
    :param recorded: the pipeline's last error if it is of this job.
    :param output: the end of the job's output.
    """
    if isinstance(reported, dict):
        kind = getattr(errors, str(reported.get("kind")), CdcError)
        return failure(str(reported.get("message")), str(reported.get("solution")), kind.retry.value)
    if recorded is not None:
        return failure(recorded["message"], recorded["solution"], recorded["retry"])
    retry = Retry.FAIL if exit_code in (ExitCode.INVALID, ExitCode.REFUSED) else Retry.RETRY
    return failure(f"the Spark job failed with exit code {exit_code}", output, retry.value)


def _last_error(pipeline: Pipeline) -> Mapping[str, str] | None:
    """The last error that the engine recorded, none where it cannot be read."""
    from airflow_cdc_provider.engine import commands

    try:
        error: Mapping[str, str] | None = commands.status(pipeline)["last_error"]
    except Exception:  # what the job failed of matters more than that its status cannot be read
        return None
    return error
