"""A pipeline as a part of a Dag, :class:`CdcTaskGroup`, or as a whole Dag, :func:`cdc_dag`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Param, TaskGroup, TriggerRule

from airflow_cdc_provider.assets import view_asset
from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.lsn import format_lsn
from airflow_cdc_provider.engine.core.stream_end import CAUGHT_UP, FOREVER, Ending
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.hooks.views import views_of
from airflow_cdc_provider.operators.prepare import CdcPrepareOperator
from airflow_cdc_provider.operators.snapshot import CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator

if TYPE_CHECKING:
    from airflow.sdk.definitions.mappedoperator import MappedOperator

UNTIL = "{{ params.get('until_lsn') or params.until }}"
"""The end of the stream, from the fields of :func:`stream_params`."""

_LSN = "[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}"
# Airflow's form shows `enum` as a list. In draft 7, a `$ref` disables the validation of keywords next to it, so that
# the command line and the API may also give an LSN or other spellings, such as `stopped` in earlier runs.
_SAID_BY_OTHERS: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$ref": "#/definitions/until",
    "definitions": {"until": {"type": "string", "pattern": f"^(caught[ _-]up|forever|stopped|(lsn:)?{_LSN})$"}},
}

_STEPS = """
* **prepare** does three steps in one process, which have rows of their own: **preflight** checks servers, privileges
  and tables, and changes nothing; **provision** creates publication and replication slot, or verifies those that exist,
  and plans the copy; **plan** divides the chunks that are not copied yet into groups.
* **snapshot** copies each group, and **stream** applies the changes until it has caught up, is stopped, or has reached
  an LSN. Both do little work themselves, and submit a Spark job for more.

Copied chunks are not copied again: a later run only catches up.
"""


_ROW = "The task `prepare` has done this step, together with others in one process: see its log."


@dataclass(frozen=True)
class PipelineSteps:
    """The tasks of a pipeline: ``prepare``, the rows of its three steps, ``snapshot`` and ``stream``."""

    prepare: CdcPrepareOperator
    preflight: EmptyOperator
    provision: EmptyOperator
    plan: EmptyOperator
    snapshot: MappedOperator
    stream: CdcStreamOperator


def pipeline_steps(
    pipeline: str,
    *,
    until: str = UNTIL,
    groups: int | str = "{{ params.groups }}",
    spark_conn_id: str = "spark_default",
    conf: Mapping[str, str] | None = None,
    pool: str | None = None,
) -> PipelineSteps:
    """Create the tasks of a pipeline in the current Dag or task group.

    The defaults use the fields of :func:`stream_params`. For the parameters see :class:`CdcTaskGroup`.
    """
    spark = {"pipeline": pipeline, "spark_conn_id": spark_conn_id, "conf": conf}
    # Without callbacks, inlets and outlets, also of `default_args`, Airflow needs no process for them.
    plain: dict[str, Any] = {"on_execute_callback": None, "on_success_callback": None, "inlets": [], "outlets": []}
    rows = {step: EmptyOperator(task_id=step, doc_md=_ROW, **plain) for step in ("preflight", "provision", "plan")}
    preflight, provision, plan = rows.values()
    ids = {step: row.task_id for step, row in rows.items()}
    prepare = CdcPrepareOperator(task_id="prepare", pipeline=pipeline, groups=groups, steps=ids)
    snapshot = CdcSnapshotOperator.partial(
        task_id="snapshot",
        epoch=f"{{{{ ti.xcom_pull(task_ids='{prepare.task_id}', key='provision')['epoch'] }}}}",
        map_index_template="{{ task.group['label'] }}",
        **({"pool": pool} if pool else {}),
        **spark,
    ).expand(group=prepare.output)
    # The stream takes its own epoch. Therefore a re-read between two tasks, which also takes one, is waited for and
    # does not fence the stream. If there are no groups, the snapshot is skipped, which must not skip later tasks.
    stream = CdcStreamOperator(task_id="stream", until=until, trigger_rule=TriggerRule.NONE_FAILED, **spark)
    # The snapshot does not wait for the rows, which become successful only when the scheduler looks again.
    prepare >> [preflight, provision, plan] >> stream
    prepare >> snapshot >> stream
    return PipelineSteps(prepare, preflight, provision, plan, snapshot, stream)


class CdcTaskGroup(TaskGroup):
    """All steps of a pipeline: preflight, provision, plan, snapshot (a mapped task for each group of chunks), stream.

    Each step is an attribute of the group, so that other tasks can depend on it. Further parameters are those of
    ``TaskGroup``.

    :param group_id: the group's name, and the prefix of its tasks' names.
    :param pipeline: path of the pipeline file; one that is relative and has no template starts at the folder of the
        calling file. (templated)
    :param until: the end of the stream, see :class:`.CdcStreamOperator`. (templated)
    :param groups: the maximum number of Spark jobs that copy chunks at the same time. (templated)
    :param spark_conn_id: the Spark connection; its master overrides that of the pipeline file.
    :param conf: Spark configuration that overrides the pipeline's ``spark.conf``. (templated)
    :param pool: the pool of the snapshot's tasks, to limit the concurrent reads of all pipelines of a source.
    """

    def __init__(
        self,
        group_id: str = "cdc",
        *,
        pipeline: str | os.PathLike[str],
        until: str = CAUGHT_UP,
        groups: int | str = 2,
        spark_conn_id: str = "spark_default",
        conf: Mapping[str, str] | None = None,
        pool: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        if isinstance(pipeline, os.PathLike) or (isinstance(pipeline, str) and "{" not in pipeline):
            pipeline = _next_to_caller(pipeline)
        with self:
            steps = pipeline_steps(
                pipeline, until=until, groups=groups, spark_conn_id=spark_conn_id, conf=conf, pool=pool
            )
        self.prepare = steps.prepare
        self.preflight, self.provision, self.plan = steps.preflight, steps.provision, steps.plan
        self.snapshot, self.stream = steps.snapshot, steps.stream


def cdc_dag(
    pipeline: str | os.PathLike[str],
    *,
    schedule: Any = None,
    until: str = CAUGHT_UP,
    groups: int = 2,
    spark_conn_id: str = "spark_default",
    conf: Mapping[str, str] | None = None,
    pool: str | None = None,
    **kwargs: Any,
) -> DAG:
    """Return the Dag of a pipeline, with name, tags and description from its file.

    The file is read where Dags are parsed, without connections and secrets. Further parameters are those of ``DAG``.

    :param pipeline: path of the pipeline file, for Dag processor and workers; a relative one starts at the folder of
        the calling file, so that a Dag bundle can have both.
    :param schedule: the schedule, for example ``*/5 * * * *`` to catch up every five minutes.
    :param until: the end of the stream; the default of the form's field.
    :param groups: the maximum number of Spark jobs that copy chunks at the same time; the default of the form's field.
    :param spark_conn_id: the Spark connection.
    :param conf: Spark configuration that overrides the pipeline's.
    :param pool: the pool of the snapshot's tasks.
    :raises ConfigError: if the file or ``until`` is invalid; Airflow shows it with the solution as an import error.
    """
    pipeline = _next_to_caller(pipeline)
    try:
        outline, params = Pipeline.outline(pipeline), stream_params(until, groups)
    except ConfigError as e:
        e.add_note(e.solution)
        raise
    settings: dict[str, Any] = {
        "dag_id": f"cdc_{outline.name}",
        "tags": ["cdc", pipeline_tag(outline.name)],
        "doc_md": _describe(outline),
        "params": params,
        "default_args": {"retries": 2, "retry_delay": timedelta(seconds=30)},
        "max_active_runs": 1,
        "catchup": False,
    }
    with DAG(schedule=schedule, **settings | kwargs) as dag:
        pipeline_steps(pipeline, spark_conn_id=spark_conn_id, conf=conf, pool=pool)
    return dag


def pipeline_tag(name: str) -> str:
    """Return the tag by which the page CDC recognizes the Dag that runs only this pipeline.

    :param name: the pipeline's name.
    """
    return f"cdc:{name}"


def pipeline_param() -> dict[str, Param]:
    """Return the form's field for the pipeline file; its default is the variable ``AIRFLOW_CDC_PIPELINE``."""
    return {
        "pipeline": Param(
            os.environ.get("AIRFLOW_CDC_PIPELINE", "/opt/airflow/pipelines/shop.yaml"),
            type="string",
            minLength=1,
            title="Pipeline file",
            description="Path of the pipeline file on the workers.",
        )
    }


def stream_params(until: str = CAUGHT_UP, groups: int = 2) -> dict[str, Param]:
    """Return the form's fields for snapshot and stream.

    :param until: the default end of the stream.
    :param groups: the default maximum number of Spark jobs that copy chunks.
    :raises ConfigError: if ``until`` is not a valid end of a stream.
    """
    ending = Ending.parse(until)
    return {
        "until": Param(
            CAUGHT_UP if ending.caught_up or ending.lsn is not None else FOREVER,
            type="string",
            enum=[CAUGHT_UP, FOREVER],
            values_display={
                CAUGHT_UP: "caught up: everything committed before it began is applied",
                FOREVER: "forever: until a user stops it",
            },
            title="Stream until",
            description="A run without end occupies no worker; end it with `airflow-cdc stop`, or with Stop on the "
            "page CDC.",
            **_SAID_BY_OTHERS,
        ),
        "until_lsn": Param(
            None if ending.lsn is None else format_lsn(ending.lsn),
            type=["null", "string"],
            pattern=f"^{_LSN}$",
            title="Stream until LSN",
            description="A position in the source's log such as 0/16B3748; overrides the choice above.",
        ),
        "groups": Param(
            groups,
            type="integer",
            minimum=1,
            maximum=32,
            title="Snapshot groups",
            description="The maximum number of Spark jobs that copy chunks at the same time.",
        ),
    }


def _next_to_caller(pipeline: str | os.PathLike[str]) -> str:
    """Return the absolute path of a pipeline file for the caller of the calling function.

    Each process that parses a Dag has the Dag's bundle in its own folder, and none has it as working directory.
    """
    return str(Path(sys._getframe(2).f_code.co_filename).absolute().parent / pipeline)


def _describe(pipeline: Pipeline) -> str:
    tables = "\n".join(f"* `{name}`" for name in pipeline.source.captured)
    views = "".join(
        f"\n* `{name}`, as the asset `{view_asset(pipeline.name, name).name}`" for name in views_of(pipeline)
    )
    sinks = " and ".join(f"{sink.type} ({sink.mode}, schema `{sink.schema}`)" for sink in pipeline.sinks)
    return (
        f"### Pipeline {pipeline.name}\n\nCopies from {pipeline.source.type} to {sinks}, and applies each change"
        f" exactly once:\n\n{tables}\n{_STEPS}" + (f"\nViews over the tables:\n{views}\n" if views else "")
    )
