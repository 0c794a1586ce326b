"""Runs the Spark jobs of Airflow tasks, without Airflow."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

# isort: split
import psutil
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_cdc_provider.engine.core.waiting import await_condition
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeat
from airflow_cdc_provider.engine.state.submission import Submission, read
from airflow_cdc_provider.operators.spark import CdcSparkOperator
from airflow_cdc_provider.triggers.job import SparkJobTrigger
from tests.support.patience import SECONDS
from tests.support.pipelines import PipelineUnderTest
from tests.support.task_instances import task_instance


class Task:
    """A task instance: the state that Airflow keeps from one try to the next."""

    def __init__(self, operator: CdcSparkOperator) -> None:
        self.operator = operator
        self.values: dict[str, Any] = {}
        self.max_tries = 2
        self.events = OutletEventAccessors()

    @property
    def context(self) -> Any:
        store = SimpleNamespace(get=self.values.get, set=lambda key, value, retention: self.values.update({key: value}))
        instance = task_instance(self.max_tries, 1)
        return {"task_state_store": store, "ti": instance, "outlet_events": self.events}

    def defer(self) -> SparkJobTrigger:
        """Run a try in the worker until it releases its slot; return the trigger as the triggerer would build it."""
        with pytest.raises(TaskDeferred) as deferred:
            self.operator.execute(self.context)
        assert deferred.value.method_name == "execute_complete"
        _, arguments = deferred.value.trigger.serialize()
        return SparkJobTrigger(**json.loads(json.dumps(arguments)))

    def run(self) -> dict[str, Any]:
        """Run a try to its end."""
        return self.complete(self.defer())

    def complete(self, trigger: SparkJobTrigger) -> dict[str, Any]:
        """Wait in the triggerer, and continue in the worker."""
        return self.operator.execute_complete(self.context, fire(trigger))


def fire(trigger: SparkJobTrigger) -> dict[str, Any]:
    """Return the event of a trigger."""

    async def first() -> Any:
        async for event in trigger.run():
            return event.payload
        return None

    event = asyncio.run(asyncio.wait_for(first(), SECONDS))
    return dict(json.loads(json.dumps(event)))


class Jobs:
    """The jobs of a pipeline, according to the state and the local processes."""

    def __init__(self, pipeline: PipelineUnderTest) -> None:
        self.pipeline = pipeline
        self.state = State(pipeline.pipeline.state)

    def submission(self, trigger: SparkJobTrigger) -> Submission:
        found = read(self.state, trigger.submission)
        assert found is not None
        return found

    def family(self) -> list[psutil.Process]:
        """Return the living processes of all jobs of the pipeline: guards, JVMs, drivers, workers, keepers."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("TEST_PIPELINE") == self.pipeline.name and process.pid != os.getpid()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def keepers(self) -> list[psutil.Process]:
        return [process for process in self.family() if "airflow_cdc_provider.hooks.keeper" in process.cmdline()]

    def driver(self, part: str) -> psutil.Process:
        beat = read_heartbeat(self.state, part)
        assert beat is not None
        return psutil.Process(beat.owner.pid)

    def await_beat(self, trigger: SparkJobTrigger) -> None:
        """Wait until the job is running."""

        def beats() -> bool:
            beat = read_heartbeat(self.state, self.submission(trigger).part)
            return beat is not None and beat.submission == trigger.submission and "changes" in beat.progress

        over = await_condition(lambda: beats() or self.submission(trigger).ended_at is not None, SECONDS, 0.2)
        assert over, self.submission(trigger)
        assert beats(), self.submission(trigger)

    def await_none(self) -> None:
        assert await_condition(lambda: not self.family(), SECONDS, 0.5), [p.cmdline() for p in self.family()]
