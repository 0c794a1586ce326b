"""The endpoints of the page CDC, for users who may see or change the Dags that run the pipelines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from airflow.api_fastapi.core_api.security import requires_access_dag
from airflow.sdk import conf
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from airflow_cdc_provider import __version__
from airflow_cdc_provider.engine.core.errors import CdcError
from airflow_cdc_provider.engine.runs.run_errors import request_stop
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import read_heartbeats
from airflow_cdc_provider.engine.state.requests import read_rereads
from airflow_cdc_provider.plugins.dags import CdcDag, Dags, DagsDep
from airflow_cdc_provider.plugins.ledgers import Ledgers
from airflow_cdc_provider.plugins.overview import describe, describe_table, guarded, summarize, wants_poll
from airflow_cdc_provider.plugins.pipeline_files import PipelineFile, find_pipelines
from airflow_cdc_provider.plugins.reports import PipelineReport, Reports, read_report, reading
from airflow_cdc_provider.plugins.slot_polls import SlotPolls
from airflow_cdc_provider.plugins.spark_ui import address_of, explain, find_job, page

STATIC = Path(__file__).with_name("static")

JsonObject = dict[str, Any]
# The form of ids of submissions, and of applications on each of Spark's masters.
_ID = "^[A-Za-z0-9_-]+$"
router = APIRouter(dependencies=[Depends(requires_access_dag("GET"))])


def make_app() -> FastAPI:
    """Return the application that Airflow mounts next to its own; its scripts are public, its data is not."""
    app = FastAPI(title="CDC", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.pipelines = Pipelines()
    app.include_router(router, prefix="/api")
    app.mount(f"/static/{__version__}", StaticFiles(directory=STATIC))
    return app


class Pipelines:
    """The pipelines that the page shows, with all information on them."""

    def __init__(self) -> None:
        self.place = str(conf.get("airflow_cdc", "pipelines"))
        self.history_server = str(conf.get("airflow_cdc", "spark_history_server"))
        self._reports = Reports()
        self._ledgers = Ledgers()
        self.polls = SlotPolls()

    def all(self, dags: Dags) -> list[JsonObject]:
        """Return a summary of each pipeline that the user may see."""
        now, files = time.time(), find_pipelines(self.place)
        reports = self._reports.of(files)
        visible = [file for file in files if dags.visible(file.name)]
        polls = self.polls.look(file.path for file in visible if wants_poll(reports[file.path], now))
        return [
            guarded(summarize, file, reports[file.path], polls.get(file.path), now, dags.own(file.name))
            for file in visible
        ]

    def find(self, name: str, dags: Dags) -> PipelineFile:
        """Return the file of a pipeline that the user may see."""
        for file in find_pipelines(self.place):
            if file.name == name and dags.visible(name):
                return file
        raise HTTPException(404, f"There is no pipeline {name!r}.")

    def describe(self, file: PipelineFile, dag: CdcDag | None = None) -> JsonObject:
        """Return all information on a pipeline.

        :param dag: the Dag that runs only this pipeline.
        """
        return self._describe(file, self._read(file), dag)

    def describe_table(self, file: PipelineFile, label: str, dag: CdcDag | None = None) -> JsonObject:
        """Return all information on a table of a pipeline.

        :param label: ``schema.name`` of the table.
        :param dag: the Dag that runs only this pipeline.
        """
        report = self._read(file)
        found = describe_table(self._describe(file, report, dag), report, label)
        if found is None or file.pipeline is None:
            raise HTTPException(404, f"Pipeline {file.name!r} has no table {label!r}.")
        with reading(file.pipeline) as state:
            return found | {"rereads": read_rereads(state, label)}

    def _read(self, file: PipelineFile) -> PipelineReport:
        return read_report(file.pipeline, self._ledgers) if file.pipeline else PipelineReport()

    def _describe(self, file: PipelineFile, report: PipelineReport, dag: CdcDag | None) -> JsonObject:
        now = time.time()
        polls = self.polls.look([file.path] if wants_poll(report, now) else [])
        return guarded(describe, file, report, polls.get(file.path), now, dag)


def _pipelines(request: Request) -> Pipelines:
    found: Pipelines = request.app.state.pipelines
    return found


PipelinesDep = Annotated[Pipelines, Depends(_pipelines)]


@router.get("/pipelines")
def list_pipelines(pipelines: PipelinesDep, dags: DagsDep) -> JsonObject:
    """Return summaries of all pipelines."""
    return {"now": time.time(), "place": pipelines.place, "pipelines": pipelines.all(dags)}


@router.get("/pipelines/{name}")
def show_pipeline(name: str, pipelines: PipelinesDep, dags: DagsDep) -> JsonObject:
    """Return one pipeline with its history, chunks, batches and errors."""
    file = pipelines.find(name, dags)
    return {"now": time.time(), "may": dags.actions(name)} | pipelines.describe(file, dags.own(name))


@router.get("/pipelines/{name}/tables/{label:path}")
def show_table(name: str, label: str, pipelines: PipelinesDep, dags: DagsDep) -> JsonObject:
    """Return one table of a pipeline with its chunks, definition and views."""
    return {"now": time.time()} | pipelines.describe_table(pipelines.find(name, dags), label, dags.own(name))


@router.get("/pipelines/{name}/spark/{submission}")
def show_spark(
    name: str,
    submission: Annotated[str, PathParameter(pattern=_ID)],
    pipelines: PipelinesDep,
    dags: DagsDep,
    application: Annotated[str | None, Query(pattern=_ID)] = None,
) -> Response:
    """Redirect a browser to Spark's page of a job.

    :param submission: the id of the job's submission.
    :param application: the id of its Spark application; used if the state no longer has the job.
    """
    try:
        pipeline = pipelines.find(name, dags).pipeline
    except HTTPException as e:
        return HTMLResponse(page(e.detail, f"The page CDC shows the files in {pipelines.place}."), e.status_code)
    if pipeline is None:
        return HTMLResponse(page(f"The file of pipeline {name!r} is invalid.", "See the page CDC for the reason."), 404)
    try:
        with reading(pipeline) as state:
            job = find_job(state, read_heartbeats(state), submission, application)
    except CdcError as e:
        return HTMLResponse(page(f"{e.message}.", e.solution), 503)
    address = address_of(job, pipelines.history_server)
    return HTMLResponse(page(*explain(job)), 404) if address is None else RedirectResponse(address)


@router.post("/pipelines/{name}/stop")
def stop_pipeline(name: str, pipelines: PipelinesDep, dags: DagsDep) -> JsonObject:
    """Ask the pipeline's jobs to end after their current unit."""
    file = pipelines.find(name, dags)
    if not dags.may_stop(name):
        raise HTTPException(403, "Forbidden")
    return {"asked": request_stop(State(file.pipeline.state), dags.user) if file.pipeline else []}
