"""The base of operators whose work is a Spark job of the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import ExitCode, Retry
from airflow_cdc_provider.hooks.cdc import LoadedPipeline, airflow_failures, failure, load_pipeline
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
        self._loaded: LoadedPipeline | None = None
        self._killed = False

    @abstractmethod
    def command_arguments(self) -> list[str]:
        """The options of the command beside pipeline and epoch."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns the pipeline's status."""
        from airflow_cdc_provider.engine import commands
        from airflow_cdc_provider.hooks.spark_job import ENGINE_JOB, SparkJobHook, packed_engine

        with airflow_failures(), packed_engine() as archive:
            self._loaded = loaded = load_pipeline(self.pipeline)
            pipeline = loaded.pipeline
            arguments = [self.command, "--pipeline", str(loaded.path), "--epoch", str(self.epoch)]
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
                raise job_failure(exit_code, before, _last_error(pipeline), self._job.output_tail)
            return commands.status(pipeline)

    def on_kill(self) -> None:
        """End all processes of the job within the five seconds that Airflow grants."""
        self._killed = True
        if self._job is not None:
            self._job.kill(self._stop_request())

    def _stop_request(self) -> Callable[[], object] | None:
        """What asks the job to end by itself, if anything can."""
        return None


def job_failure(
    exit_code: int, before: Mapping[str, str] | None, after: Mapping[str, str] | None, output: str
) -> AirflowException:
    """The exception for a job that failed.

    :param exit_code: what spark-submit exited with, which is the engine's code if the engine came that far.
    :param before: the pipeline's last error before the job.
    :param after: the pipeline's last error after the job.
    :param output: the end of the job's output.
    """
    # Spark's own failures exit with 1 too. An error that stood there before is then perhaps not of this job.
    if after is not None and (after != before or exit_code in (ExitCode.INVALID, ExitCode.REFUSED)):
        return failure(after["message"], after["solution"], after["retry"])
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
