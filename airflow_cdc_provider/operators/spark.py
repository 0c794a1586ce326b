"""The base of operators whose work is a Spark job of the engine, unless there is little to do.

The job does not belong to the process that submits it. Before anything is started, the task stores the job's id in
Airflow's task state store, where it survives between tries; all other information is in the pipeline's state. Therefore
a task that dies with its worker or in the triggerer finds its job again.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]
from airflow.sdk.exceptions import AirflowException, AirflowTaskTimeout

from airflow_cdc_provider.deferral import container_ends_with_task, default_deferrable
from airflow_cdc_provider.engine.core.errors import Retry
from airflow_cdc_provider.hooks.cdc import LoadedPipeline, airflow_failures, failure, load_pipeline
from airflow_cdc_provider.hooks.views import ViewMarks, read_view_marks
from airflow_cdc_provider.links.spark import SparkUiLink
from airflow_cdc_provider.operators.base import CdcOperator
from airflow_cdc_provider.operators.job_handle import FirstAction, Handle, first_action
from airflow_cdc_provider.operators.local_work import unless_it_may_pass, work_locally

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.state.files import State
    from airflow_cdc_provider.engine.state.submission import Submission

_KEY = "spark_job"
# Airflow stores and shows a task's log as a whole, while the file may have 10 MiB.
_LOG_LINES = 1000
# Added to the trigger's own deadline, in case the triggerer is down at that time.
_TRIGGER_GRACE = timedelta(minutes=5)


class CdcSparkOperator(CdcOperator):
    """A command of the engine that runs as a Spark job and outlives the task's processes; little work needs no job.

    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master overrides that of the pipeline file.
    :param conf: Spark configuration that overrides the pipeline's ``spark.conf``. (templated)
    :param deferrable: whether to wait in the triggerer, see :func:`.default_deferrable`; otherwise the task occupies a
        worker slot while it waits.
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "epoch", "conf")
    operator_extra_links = (*CdcOperator.operator_extra_links, SparkUiLink())

    command: str
    """The command of the engine, a class attribute of each operator."""
    resumes_epoch: bool
    """Whether a restarted job continues under the epoch of the run; otherwise it takes a new one."""
    moves_views = False
    """Whether the job may move views, whose marks are then read before the first job."""

    def __init__(
        self,
        *,
        epoch: int | str | None = None,
        spark_conn_id: str = "spark_default",
        conf: Mapping[str, str] | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.epoch = epoch
        self.spark_conn_id = spark_conn_id
        self.conf = conf
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.submission: str | None = None
        self.application: str | None = None
        self._job: tuple[State, str] | None = None
        self._deadline: float | None = None
        self._killed = False

    @property
    @abstractmethod
    def part(self) -> str:
        """Return the name of the job's part of the run."""

    @abstractmethod
    def command_arguments(self) -> list[str]:
        """Return the options of the command, without pipeline and epoch."""

    @abstractmethod
    def needs_spark(self, pipeline: Pipeline) -> bool:
        """Return whether the work is too much for the process of the task."""

    @abstractmethod
    def command_here(self, pipeline: Pipeline, epoch: int | None) -> dict[str, Any]:
        """Run the command in this process, without Spark, and return its result.

        :param epoch: the epoch of the run; ``None`` to take a new one.
        """

    @abstractmethod
    def stopped_result(self) -> dict[str, Any]:
        """Return the task's result if the job died after a user had asked it to stop."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Start the job, or find it again, and wait for its end; return the result of the command."""
        while (result := self._work(context)) is None:
            time.sleep(self._pause.total_seconds())
        return result

    def _work(self, context: Context) -> dict[str, Any] | None:
        """Do one attempt of :meth:`execute`; without a result, the job must be started again."""
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.submission import TaskAddress, askers, read

        with airflow_failures(self.pipeline, self.command):
            loaded = load_pipeline(self.pipeline)
            state, store = State(loaded.pipeline.state), context["task_state_store"]
            known: Any = store.get(_KEY)
            handle = Handle(**known) if known else None
            fingerprint, max_tries = self._fingerprint(loaded), context["ti"].max_tries
            job = read(state, handle.submission) if handle and handle.submission else None
            status = job.status(askers(state, job.id)) if job else None
            step = first_action(handle, fingerprint, max_tries, status)
            if handle is not None and handle.result is not None and handle.belongs_to(fingerprint, max_tries):
                self.log.info("An earlier try has done the work already.")
                return self._returned(context, handle.result)
            if job is not None and step is FirstAction.RETURN:
                self.log.info("The Spark job %s has done the work already.", job.id)
                self.submission, self.application = job.id, job.application
                return self._returned(context, job.result)
            if job is not None and step is FirstAction.REATTACH:
                self.log.info("The Spark job %s is alive.", job.id)
            else:
                if job is not None:
                    self._make_sure_of_end(state, job)
                first = handle is None
                handle = Handle("", fingerprint, max_tries).follows(handle)
                if self.moves_views and handle.views is None:
                    handle = replace(handle, views=read_view_marks(loaded.pipeline))
                small = unless_it_may_pass(lambda: not self.needs_spark(loaded.pipeline), self.command, self.log)
                if small and not self._killed:
                    self._keep(context, handle)
                    result = self._work_here(loaded.pipeline, first)
                    if result is not None:
                        self._keep(context, replace(handle, result=result))
                        return self._returned(context, result)
                    first = False
                task = TaskAddress(*(getattr(context["ti"], each.name) for each in fields(TaskAddress)))
                job, hook = replace(self._new_submission(loaded, first), task=task), self._hook(loaded)
                self._keep(context, replace(handle, submission=job.id))
                self._submit(hook, state, job)
            self._job, self.submission = (state, job.id), job.id
            return self._wait(context, state, job.id)

    def _work_here(self, pipeline: Pipeline, first: bool) -> dict[str, Any] | None:
        """Do the work in this process; ``None`` if a job has to continue it."""
        epoch = self._epoch_of(first)
        result = work_locally(pipeline, lambda once: self.command_here(once, epoch), self.command, self.log)
        if result is None and self._killed:
            raise AirflowException("The task was asked to end before its work was done.")
        return result

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the command, or start the job again, or fail as the job did."""
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        result = self._concluded(context, event)
        if result is None:
            deadline = {"deadline": event.get("deadline")}
            self.defer(trigger=TimeDeltaTrigger(self._pause), method_name="resume", kwargs=deadline)
        return result

    def resume(self, context: Context, event: Any = None, deadline: float | None = None) -> dict[str, Any]:
        """Start the job again in the same try.

        :param deadline: the end of the try's time, in seconds since 1970.
        """
        self._deadline = deadline
        return self.execute(context)

    def _concluded(self, context: Context, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of the command; ``None`` if the job must be started again in this try."""
        from airflow_cdc_provider.engine.state.submission import Status
        from airflow_cdc_provider.triggers.job import TIMEOUT

        self._log_output(event)
        self.submission, self.application = event["id"], event.get("application")
        if event["status"] == Status.DONE:
            return self._returned(context, event["result"])
        if event["status"] == TIMEOUT:
            raise AirflowTaskTimeout("The task exceeded its execution_timeout, and its Spark job was stopped.")
        if event["status"] == Status.FAILED:
            error = event["error"]
            failed = failure(error["message"], error["solution"], error["retry"], error["kind"])
        else:
            failed = failure(
                "the Spark job was ended before its work was done",
                "Retry the task: committed data remains, and the next try continues from there.",
                "retry",
            )
        if not self._starts_again(context, event, failed.directive):
            raise failed
        self.log.warning("%s\nNo retries are left, but some since the last commit: the job is started again.", failed)
        return None

    def _starts_again(self, context: Context, event: Mapping[str, Any], directive: Retry) -> bool:
        """Return whether to start a failed job again although Airflow has no retry left.

        Airflow counts the tries of a task instance, even if a stream runs for months. This operator counts only the
        failures since the last commit. Airflow's tries are used first, because they are visible to users.
        """
        if directive is not Retry.RETRY or self._killed:
            return False
        known: Any = context["task_state_store"].get(_KEY)
        if not known:
            return False
        handle = Handle(**known)
        failures = 1 if event.get("progressed") else handle.failures + 1
        self._keep(context, replace(handle, failures=failures))
        instance = context["ti"]
        return instance.try_number > instance.max_tries and failures <= (self.retries or 0)

    def views_before(self, context: Context) -> ViewMarks:
        """Return the marks of the views before the first job of this work."""
        known: Any = context["task_state_store"].get(_KEY)
        return (Handle(**known).views if known else None) or {}

    @property
    def _pause(self) -> timedelta:
        """Return the pause between a failure and the next job of the same try, which is the same as between tries."""
        return self.retry_delay if isinstance(self.retry_delay, timedelta) else timedelta(seconds=self.retry_delay)

    def _keep(self, context: Context, handle: Handle) -> None:
        context["task_state_store"].set(_KEY, asdict(handle), retention=NEVER_EXPIRE)

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Report the work of the job to Airflow.

        :param result: the result of the command.
        """
        self.record_flows(pipeline)

    def on_kill(self) -> None:
        """Ask the job to end; its keeper makes sure that it does after this process is gone."""
        from airflow_cdc_provider.engine.state.submission import Asker, ask_to_stop

        self._killed = True
        if self._job is not None:
            ask_to_stop(*self._job, Asker.AIRFLOW)

    def _wait(self, context: Context, state: State, submission: str) -> dict[str, Any] | None:
        from airflow_cdc_provider.engine.state.submission import Asker, ask_to_stop
        from airflow_cdc_provider.triggers.job import POLL_SECONDS, JobMonitor, SparkJobTrigger

        if self._killed:  # possibly before the job was known
            ask_to_stop(state, submission, Asker.AIRFLOW)
        elif self.deferrable and not self._would_end(state, submission):
            limit, deadline = self.execution_timeout, self._deadline
            if limit and deadline is None:
                deadline = time.time() + limit.total_seconds()
            self.defer(
                trigger=SparkJobTrigger(state.url, submission, deadline),
                method_name="execute_complete",
                timeout=limit + _TRIGGER_GRACE if limit else None,
            )
        watch = JobMonitor(state, submission, None, self.log.info)
        while (event := watch.look()) is None:
            time.sleep(POLL_SECONDS)
        return self._concluded(context, event)

    def _would_end(self, state: State, submission: str) -> bool:
        """Return whether the job would end if the task deferred, and report that."""
        from airflow_cdc_provider.engine.state.submission import read

        job = read(state, submission)
        if not container_ends_with_task() or (job is not None and job.cluster):
            return False
        self.log.info(
            "The task does not defer, because its executor would then end its container, and the Spark job with it."
            " In cluster mode, the job runs elsewhere, and the task defers."
        )
        return True

    def _make_sure_of_end(self, state: State, job: Submission) -> None:
        """End the previous job of a task that was killed or cleared, or that has other work now."""
        from airflow_cdc_provider.engine.state.submission import give_up, stop

        if job.lives:
            self.log.info("Asking the previous Spark job %s to end.", job.id)
            if not stop(state, job.id):
                give_up(state, job, "it does not end")

    def _new_submission(self, loaded: LoadedPipeline, first: bool) -> Submission:
        from airflow_cdc_provider.engine.state.submission import Submission

        number = self._epoch_of(first)
        epoch = [] if number is None else ["--epoch", str(number)]
        common = [self.command, "--pipeline", str(loaded.path), *epoch, "--json"]
        return Submission.new(loaded.pipeline.name, self.part, [*common, *self.command_arguments()])

    def _epoch_of(self, first: bool) -> int | None:
        """Return the epoch of the run if the work takes place under it.

        :param first: whether nothing has worked under it yet.
        """
        return int(self.epoch) if self.epoch is not None and (first or self.resumes_epoch) else None

    def _hook(self, loaded: LoadedPipeline) -> Any:
        from airflow_cdc_provider.hooks.spark_job import SparkJobHook

        name = f"airflow-cdc {loaded.pipeline.name} {self.command}"
        return SparkJobHook(self.spark_conn_id, loaded=loaded, name=name, conf=self.conf or {})

    def _submit(self, hook: Any, state: State, job: Submission) -> None:
        from airflow_cdc_provider.engine.core.errors import CdcError
        from airflow_cdc_provider.engine.state.submission import end

        if self._killed:
            raise AirflowException("The task was asked to end before its Spark job began.")
        self._job = state, job.id
        try:
            hook.start(job)
        except Exception as e:
            # Messages of other errors may have secrets.
            reason = str(e) if isinstance(e, (CdcError, OSError)) else type(e).__name__
            failure = {
                "kind": type(e).__name__,
                "message": f"the Spark job could not be started: {reason}",
                "solution": getattr(e, "solution", ""),
                "retry": "retry",
            }
            end(state, job.id, error=failure)
            raise
        self.log.info("The Spark job %s is submitted.", job.id)

    def _fingerprint(self, loaded: LoadedPipeline) -> str:
        what = [self.command, loaded.pipeline.name, str(loaded.path), self.epoch, *self.command_arguments()]
        return hashlib.sha256(json.dumps(list(map(str, what))).encode()).hexdigest()

    def _returned(self, context: Context, result: dict[str, Any] | None) -> dict[str, Any]:
        if result is None:
            self.log.info("The job was asked to stop, and is not restarted.")
            return self.stopped_result()
        with airflow_failures():
            self.completed(context, load_pipeline(self.pipeline).pipeline, result)
        return result

    def _log_output(self, event: Mapping[str, Any]) -> None:
        """Write the end of the job's output to the task's log, if the file can be read on this host.

        From there, Airflow takes it to its remote logs.
        """
        path, keeper = event["log"], event["keeper"]
        if not path:
            return
        try:
            with Path(path).open(encoding="utf-8", errors="replace") as file:
                lines = deque(file, _LOG_LINES)
        except OSError:
            host = keeper["host"].partition("/")[0] if keeper else "the worker's host"
            self.log.info("The output of the job is in %s on %s.", path, host)
            return
        self.log.info("::group::The end of the job's output, which is in %s", path)
        for line in lines:
            self.log.info("%s", line.rstrip("\n"))
        self.log.info("::endgroup::")
