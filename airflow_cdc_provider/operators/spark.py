"""The base of operators whose work is a Spark job of the engine.

The job does not belong to the process that submits it. What the task knows of it between two tries, its id, stands in
Airflow's task state store before anything is started; all else stands in the pipeline's state. So a task that dies,
with its worker or in the triggerer, finds its job again.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]
from airflow.sdk.exceptions import AirflowException, AirflowTaskTimeout

from airflow_cdc_provider.engine.core.errors import Retry
from airflow_cdc_provider.hooks.cdc import LoadedPipeline, airflow_failures, failure, load_pipeline
from airflow_cdc_provider.links.spark import SparkUiLink
from airflow_cdc_provider.operators.base import CdcOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
    from airflow_cdc_provider.engine.state.files import State
    from airflow_cdc_provider.engine.state.submission import Status, Submission

_KEY = "spark_job"
_LOG_LINES = 40
# Beyond its own deadline, in case that the triggerer is down then.
_TRIGGER_GRACE = timedelta(minutes=5)


@dataclass(frozen=True)
class Handle:
    """What a task keeps of its job between tries.

    :param submission: the id of the job's submission.
    :param fingerprint: what was to be done; the store goes by the position of a mapped task, which may be another's.
    :param max_tries: the task instance's, which changes when it is cleared, and not when it is tried again.
    :param failures: of jobs of this work since one of them has last committed anything.
    """

    submission: str
    fingerprint: str
    max_tries: int
    failures: int = 0

    def follows(self, before: Handle | None) -> Handle:
        """This one, with the failures of the one before if that is of the same work."""
        same = before is not None and (before.fingerprint, before.max_tries) == (self.fingerprint, self.max_tries)
        return replace(self, failures=before.failures) if before is not None and same else self


class Step(Enum):
    """What a try begins with."""

    SUBMIT = "submit"
    REATTACH = "reattach"
    RETURN = "return"


def next_step(handle: Handle | None, fingerprint: str, max_tries: int, status: Status | None) -> Step:
    """Decide what a try begins with.

    :param handle: what an earlier try has left.
    :param status: of the job that it names; ``None`` when the state does not know it.
    """
    from airflow_cdc_provider.engine.state.submission import Status

    if handle is None or (handle.fingerprint, handle.max_tries) != (fingerprint, max_tries):
        return Step.SUBMIT
    steps: dict[Status | None, Step] = {Status.RUNNING: Step.REATTACH, Status.DONE: Step.RETURN}
    return steps.get(status, Step.SUBMIT)


class CdcSparkOperator(CdcOperator):
    """Runs a command of the engine as a Spark job that outlives the task's processes.

    :param pipeline: path of the pipeline file. (templated)
    :param epoch: the epoch that ``provision`` returned. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param deferrable: wait in the triggerer; otherwise in the worker, whose slot is taken for as long.
    """

    template_fields: Sequence[str] = (*CdcOperator.template_fields, "epoch", "conf")
    operator_extra_links = (*CdcOperator.operator_extra_links, SparkUiLink())

    command: str
    """The command of the engine, a class attribute of each operator."""
    resumes_epoch: bool
    """Whether a job that is begun again goes on under the epoch of the run, or takes a new one."""

    def __init__(
        self,
        *,
        epoch: int | str | None = None,
        spark_conn_id: str = "spark_default",
        conf: Mapping[str, str] | None = None,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.epoch = epoch
        self.spark_conn_id = spark_conn_id
        self.conf = conf
        self.deferrable = deferrable
        self.submission: str | None = None
        self.application: str | None = None
        self._job: tuple[State, str] | None = None
        self._deadline: float | None = None
        self._killed = False

    @property
    @abstractmethod
    def part(self) -> str:
        """The part of the run that the job is."""

    @abstractmethod
    def command_arguments(self) -> list[str]:
        """The options of the command beside pipeline and epoch."""

    @abstractmethod
    def stopped_result(self) -> dict[str, Any]:
        """What the task returns when the job died after a user had asked it to stop."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Begin the job, or find it again, and wait for its end; returns what the command returned."""
        while (result := self._work(context)) is None:
            time.sleep(self._pause.total_seconds())
        return result

    def _work(self, context: Context) -> dict[str, Any] | None:
        """See :meth:`execute`; without a result the job has to be begun again."""
        from airflow_cdc_provider.engine.state.files import State
        from airflow_cdc_provider.engine.state.submission import askers, read

        with airflow_failures(self.pipeline, self.command):
            loaded = load_pipeline(self.pipeline)
            state, store = State(loaded.pipeline.state), context["task_state_store"]
            known: Any = store.get(_KEY)
            handle = Handle(**known) if known else None
            fingerprint, max_tries = self._fingerprint(loaded), context["ti"].max_tries
            job = read(state, handle.submission) if handle else None
            status = job.status(askers(state, job.id)) if job else None
            step = next_step(handle, fingerprint, max_tries, status)
            if job is not None and step is Step.RETURN:
                self.log.info("The Spark job %s has done the work already.", job.id)
                self.submission, self.application = job.id, job.application
                return self._returned(context, job.result)
            if job is not None and step is Step.REATTACH:
                self.log.info("The Spark job %s is alive.", job.id)
            else:
                if job is not None:
                    self._make_sure_of_end(state, job)
                job = self._new_submission(loaded, first=handle is None)
                hook = self._hook(loaded)
                self._keep(context, Handle(job.id, fingerprint, max_tries).follows(handle))
                self._submit(hook, state, job)
            self._job, self.submission = (state, job.id), job.id
            return self._wait(context, state, job.id)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return what the command returned, or begin it again, or fail as the job did."""
        from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger

        result = self._concluded(context, event)
        if result is None:
            deadline = {"deadline": event.get("deadline")}
            self.defer(trigger=TimeDeltaTrigger(self._pause), method_name="resume", kwargs=deadline)
        return result

    def resume(self, context: Context, event: Any = None, deadline: float | None = None) -> dict[str, Any]:
        """Begin the job again in the same try.

        :param deadline: when the try's time is up, in seconds since 1970.
        """
        self._deadline = deadline
        return self.execute(context)

    def _concluded(self, context: Context, event: dict[str, Any]) -> dict[str, Any] | None:
        """What the command returned; ``None`` when the job has to be begun again in this try."""
        from airflow_cdc_provider.engine.state.submission import Status
        from airflow_cdc_provider.triggers.job import TIMEOUT

        self._log_output(event)
        self.submission, self.application = event["id"], event.get("application")
        if event["status"] == Status.DONE:
            return self._returned(context, event["result"])
        if event["status"] == TIMEOUT:
            raise AirflowTaskTimeout("The task's time was up, and its Spark job was stopped.")
        if event["status"] == Status.FAILED:
            error = event["error"]
            failed = failure(error["message"], error["solution"], error["retry"], error["kind"])
        else:
            failed = failure(
                "the Spark job was ended before its work was done",
                "What it has committed stays; the next try goes on from there.",
                "retry",
            )
        if not self._goes_on(context, event, failed.directive):
            raise failed
        self.log.warning("%s\nThe tries are used up, but not since the last commit: the job is begun again.", failed)
        return None

    def _goes_on(self, context: Context, event: Mapping[str, Any], directive: Retry) -> bool:
        """Whether a job that failed is begun again although Airflow has no try left.

        Airflow counts the tries of a task instance, that of a stream of months too. Here failures count since the last
        commit; while Airflow has tries left, they are used, as they are seen and told.
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

    @property
    def _pause(self) -> timedelta:
        """Between a failure and the next job of the same try, as between tries."""
        return self.retry_delay if isinstance(self.retry_delay, timedelta) else timedelta(seconds=self.retry_delay)

    def _keep(self, context: Context, handle: Handle) -> None:
        context["task_state_store"].set(_KEY, asdict(handle), retention=NEVER_EXPIRE)

    def completed(self, context: Context, pipeline: Pipeline, result: Mapping[str, Any]) -> None:
        """Tell Airflow what the job has done.

        :param result: what the command returned.
        """
        self.record_flows(pipeline)

    def on_kill(self) -> None:
        """Ask the job to end; who keeps it sees to that, when this process is gone."""
        from airflow_cdc_provider.engine.state.submission import Asker, ask_to_stop

        self._killed = True
        if self._job is not None:
            ask_to_stop(*self._job, Asker.AIRFLOW)

    def _wait(self, context: Context, state: State, submission: str) -> dict[str, Any] | None:
        from airflow_cdc_provider.engine.state.submission import Asker, ask_to_stop
        from airflow_cdc_provider.triggers.job import POLL_SECONDS, SparkJobTrigger, Watch

        if self._killed:  # perhaps before it was known which job is meant
            ask_to_stop(state, submission, Asker.AIRFLOW)
        elif self.deferrable:
            limit, deadline = self.execution_timeout, self._deadline
            if limit and deadline is None:
                deadline = time.time() + limit.total_seconds()
            self.defer(
                trigger=SparkJobTrigger(state.url, submission, deadline),
                method_name="execute_complete",
                timeout=limit + _TRIGGER_GRACE if limit else None,
            )
        watch = Watch(state, submission, None, self.log.info)
        while (event := watch.look()) is None:
            time.sleep(POLL_SECONDS)
        return self._concluded(context, event)

    def _make_sure_of_end(self, state: State, job: Submission) -> None:
        """End the job of a task that has been killed or cleared, or that has other work now."""
        from airflow_cdc_provider.engine.state.submission import give_up, stop

        if job.lives:
            self.log.info("The Spark job %s of before is asked to end.", job.id)
            if not stop(state, job.id):
                give_up(state, job, "it does not end")

    def _new_submission(self, loaded: LoadedPipeline, first: bool) -> Submission:
        from airflow_cdc_provider.engine.state.submission import Submission

        epoch = ["--epoch", str(self.epoch)] if self.epoch is not None and (first or self.resumes_epoch) else []
        common = [self.command, "--pipeline", str(loaded.path), *epoch, "--json"]
        return Submission.new(loaded.pipeline.name, self.part, [*common, *self.command_arguments()])

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
            # Of other errors nobody knows whether they tell a secret.
            reason = str(e) if isinstance(e, (CdcError, OSError)) else type(e).__name__
            told = {
                "kind": type(e).__name__,
                "message": f"the Spark job was not begun: {reason}",
                "solution": getattr(e, "solution", ""),
                "retry": "retry",
            }
            end(state, job.id, error=told)
            raise
        self.log.info("The Spark job %s is submitted.", job.id)

    def _fingerprint(self, loaded: LoadedPipeline) -> str:
        what = [self.command, loaded.pipeline.name, str(loaded.path), self.epoch, *self.command_arguments()]
        return hashlib.sha256(json.dumps(list(map(str, what))).encode()).hexdigest()

    def _returned(self, context: Context, result: dict[str, Any] | None) -> dict[str, Any]:
        if result is None:
            self.log.info("The job was asked to stop, and is not begun again.")
            return self.stopped_result()
        with airflow_failures():
            self.completed(context, load_pipeline(self.pipeline).pipeline, result)
        return result

    def _log_output(self, event: Mapping[str, Any]) -> None:
        """Let the end of the job's output stand in the task's log, if it can be read here."""
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
        self.log.info("The end of the job's output, which is in %s:", path)
        for line in lines:
            self.log.info("%s", line.rstrip("\n"))
