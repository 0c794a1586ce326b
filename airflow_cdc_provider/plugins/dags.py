"""The Dags that run pipelines, and the user's permissions on them; the page queries nothing else from Airflow itself.

A pipeline's own Dag is the one with the tags ``cdc`` and ``cdc:<pipeline>``, which ``cdc_dag()`` sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from airflow.models.dag import DagModel, DagTag
from fastapi import Depends, HTTPException, Request
from sqlalchemy import select

from airflow_cdc_provider.dag import pipeline_tag

TAG = "cdc"
RUN_DAG, VERIFY_DAG, REREAD_DAG = "cdc_pipeline", "cdc_verify", "cdc_resnapshot"
"""The Dag for pipelines without their own Dag, the one that verifies, and the one that reads tables again.

All take the file as a parameter.
"""


@dataclass
class CdcDag:
    """A Dag with the tag ``cdc``.

    :param next_run: time of its next scheduled run, in seconds since 1970; ``None`` without a schedule.
    :param tags: its other tags.
    """

    dag_id: str
    is_paused: bool
    next_run: float | None = None
    tags: set[str] = field(default_factory=set)


class Dags:
    """The Dags of this provider and the user's permissions on them, queried as Airflow's own endpoints do."""

    def __init__(self, request: Request, user: GetUserDep, session: SessionDep) -> None:
        self._request = request
        self._user = user
        self._decided: dict[tuple[str, str, DagAccessEntity | None], bool] = {}
        marked = select(DagTag.dag_id).where(DagTag.name == TAG)
        query = (
            select(DagModel.dag_id, DagModel.is_paused, DagModel.next_dagrun_create_after, DagTag.name)
            .join(DagTag, DagTag.dag_id == DagModel.dag_id)
            .where(DagModel.dag_id.in_(marked), DagModel.is_stale.is_(False))
            .order_by(DagModel.dag_id)
        )
        self._dags: dict[str, CdcDag] = {}
        for dag_id, is_paused, after, tag in session.execute(query):
            known = self._dags.setdefault(dag_id, CdcDag(dag_id, is_paused, after.timestamp() if after else None))
            known.tags.add(tag)
        self.user = user.get_name()

    def own(self, pipeline: str) -> CdcDag | None:
        """Return the Dag that runs only this pipeline, if there is one."""
        expected = self._dags.get(f"{TAG}_{pipeline}")
        tagged = [dag for dag in self._dags.values() if pipeline_tag(pipeline) in dag.tags]
        return expected if expected in tagged else next(iter(tagged), None)

    def visible(self, pipeline: str) -> bool:
        """Return whether the user may see a pipeline: its own Dag, or otherwise the shared Dag."""
        own = self.own(pipeline)
        return self._may("GET", own.dag_id if own else RUN_DAG)

    def may_stop(self, pipeline: str) -> bool:
        """Return whether the user may end runs of the pipeline's Dag."""
        own = self.own(pipeline)
        return self._may("PUT", own.dag_id if own else RUN_DAG, DagAccessEntity.RUN)

    def actions(self, pipeline: str) -> Mapping[str, Any]:
        """Return the actions that the page has buttons for; Airflow checks permissions again when one is pressed.

        :returns: whether the user may ``stop`` the jobs; the Dag that runs the pipeline, the one that verifies it and
            the one that reads its tables again, or ``None`` if there is none, each with the user's permissions on it.
        """
        own = self.own(pipeline)
        return {
            "stop": self.may_stop(pipeline),
            "run": self._described(own or self._dags.get(RUN_DAG), shared=own is None),
            "verify": self._described(self._dags.get(VERIFY_DAG), shared=True),
            "reread": self._described(self._dags.get(REREAD_DAG), shared=True),
        }

    def _described(self, dag: CdcDag | None, shared: bool) -> Mapping[str, Any] | None:
        if dag is None:
            return None
        return {
            "dag_id": dag.dag_id,
            "is_paused": dag.is_paused,
            "shared": shared,
            "may_pause": self._may("PUT", dag.dag_id),
            "may_trigger": self._may("POST", dag.dag_id, DagAccessEntity.RUN),
        }

    def _may(self, method: Literal["GET", "POST", "PUT"], dag_id: str, entity: DagAccessEntity | None = None) -> bool:
        asked = (method, dag_id, entity)
        if asked not in self._decided:  # only once for each Dag, because an auth manager may have to ask a server
            try:
                requires_access_dag(method, entity, dag_id)(self._request, self._user)
            except HTTPException:
                self._decided[asked] = False
            else:
                self._decided[asked] = True
        return self._decided[asked]


DagsDep = Annotated[Dags, Depends(Dags)]
