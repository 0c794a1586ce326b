"""A pipeline as a part of a Dag, :class:`CdcTaskGroup`, and as a whole one, :func:`cdc_dag`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, TaskGroup, TriggerRule

from airflow_cdc_provider.engine.config import Pipeline
from airflow_cdc_provider.engine.errors import ConfigError
from airflow_cdc_provider.operators.pipeline import CdcPreflightOperator, CdcProvisionOperator
from airflow_cdc_provider.operators.snapshot import CdcPlanOperator, CdcSnapshotOperator
from airflow_cdc_provider.operators.stream import CdcStreamOperator

_LSN = "[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}"

_STEPS = """
* **preflight** checks servers, privileges and tables, and changes nothing.
* **provision** makes publication and replication slot, or verifies those that exist, and plans the copy.
* **plan** divides the chunks that are not copied yet into groups; **snapshot** copies each group in a Spark job.
* **stream** applies the changes until it has caught up, is stopped, or has reached an LSN.

What was copied is not copied again: a later run catches up.
"""


class CdcTaskGroup(TaskGroup):
    """All steps of a pipeline: preflight, provision, plan, snapshot (one mapped task a group of chunks), stream.

    Each is an attribute of the group, to hang other tasks on. Further parameters are those of ``TaskGroup``.

    :param group_id: the group's name, and the prefix of its tasks' names.
    :param pipeline: path of the pipeline file. (templated)
    :param until: where the stream ends, see :class:`.CdcStreamOperator`. (templated)
    :param groups: how many Spark jobs copy chunks at the same time, at most. (templated)
    :param spark_conn_id: the Spark connection; its master wins over that of the pipeline file.
    :param conf: Spark configuration, merged over the pipeline's ``spark.conf``. (templated)
    :param pool: the pool of the snapshot's tasks, to bound what all pipelines of a source read at the same time.
    """

    def __init__(
        self,
        group_id: str = "cdc",
        *,
        pipeline: str,
        until: str = "caught_up",
        groups: int | str = 2,
        spark_conn_id: str = "spark_default",
        conf: Mapping[str, str] | None = None,
        pool: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        spark = {"pipeline": pipeline, "spark_conn_id": spark_conn_id, "conf": conf}
        with self:
            self.preflight = CdcPreflightOperator(task_id="preflight", pipeline=pipeline)
            self.provision = CdcProvisionOperator(task_id="provision", pipeline=pipeline)
            self.plan = CdcPlanOperator(task_id="plan", pipeline=pipeline, groups=groups)
            self.snapshot = CdcSnapshotOperator.partial(
                task_id="snapshot",
                epoch=f"{{{{ ti.xcom_pull(task_ids='{self.provision.task_id}')['epoch'] }}}}",
                map_index_template="{{ task.group['label'] }}",
                **({"pool": pool} if pool else {}),
                **spark,
            ).expand(group=self.plan.output)
            # With an epoch of its own: a re-read between two tasks, which takes one too, is waited for and does not
            # fence it. A snapshot without groups is skipped, which must not skip what follows.
            self.stream = CdcStreamOperator(
                task_id="stream", until=until, trigger_rule=TriggerRule.NONE_FAILED, **spark
            )
            self.preflight >> self.provision >> self.plan >> self.snapshot >> self.stream


def cdc_dag(
    pipeline: str | os.PathLike[str],
    *,
    schedule: Any = None,
    until: str = "caught_up",
    groups: int = 2,
    spark_conn_id: str = "spark_default",
    conf: Mapping[str, str] | None = None,
    pool: str | None = None,
    **kwargs: Any,
) -> DAG:
    """The Dag of a pipeline, named, tagged and described after its file.

    The file is read where Dags are parsed, without connections and secrets. Further parameters are those of ``DAG``.

    :param pipeline: path of the pipeline file, for Dag processor and workers.
    :param schedule: when it runs, for example ``*/5 * * * *`` to catch up every five minutes.
    :param until: where the stream ends, the default of the form's field.
    :param groups: how many Spark jobs copy chunks at the same time, at most; the default of the form's field.
    :param spark_conn_id: the Spark connection.
    :param conf: Spark configuration, merged over the pipeline's.
    :param pool: the pool of the snapshot's tasks.
    :raises ConfigError: when the file is wrong; Airflow shows it, with the solution, as an import error.
    """
    try:
        outline = Pipeline.outline(pipeline)
    except ConfigError as e:
        e.add_note(e.solution)
        raise
    settings: dict[str, Any] = {
        "dag_id": f"cdc_{outline.name}",
        "tags": ["cdc", pipeline_tag(outline.name)],
        "doc_md": _describe(outline),
        "params": stream_params(until, groups),
        "default_args": {"retries": 2, "retry_delay": timedelta(seconds=30)},
        "max_active_runs": 1,
        "catchup": False,
    }
    with DAG(schedule=schedule, **settings | kwargs) as dag:
        CdcTaskGroup(
            prefix_group_id=False,
            pipeline=os.fspath(pipeline),
            until="{{ params.until }}",
            groups="{{ params.groups }}",
            spark_conn_id=spark_conn_id,
            conf=conf,
            pool=pool,
        )
    return dag


def pipeline_tag(name: str) -> str:
    """The tag by which the page CDC knows the Dag that runs a pipeline and no other.

    :param name: the pipeline's.
    """
    return f"cdc:{name}"


def pipeline_param() -> dict[str, Param]:
    """The field of a form that names the pipeline file; its default is the variable ``AIRFLOW_CDC_PIPELINE``."""
    return {
        "pipeline": Param(
            os.environ.get("AIRFLOW_CDC_PIPELINE", "/opt/airflow/pipelines/shop.yaml"),
            type="string",
            minLength=1,
            title="Pipeline file",
            description="Path of the pipeline file on the workers.",
            section="Pipeline",
        )
    }


def stream_params(until: str = "caught_up", groups: int = 2) -> dict[str, Param]:
    """The fields of a form for what snapshot and stream do.

    :param until: the default of where the stream ends.
    :param groups: the default of how many Spark jobs copy chunks.
    """
    return {
        "until": Param(
            until,
            type="string",
            pattern=f"^(caught[_-]up|stopped|(lsn:)?{_LSN})$",
            examples=["caught_up", "stopped"],
            title="Stream until",
            description="caught_up: all that was committed before the stream began is applied; stopped: until "
            "`airflow-cdc stop`; or an LSN such as 0/16B3748.",
            section="Stream",
        ),
        "groups": Param(
            groups,
            type="integer",
            minimum=1,
            maximum=32,
            title="Snapshot groups",
            description="How many Spark jobs copy chunks at the same time, at most.",
            section="Snapshot",
        ),
    }


def _describe(pipeline: Pipeline) -> str:
    tables = "\n".join(f"* `{name}`" for name in pipeline.captured)
    sinks = " and ".join(f"{sink.type} ({sink.mode}, schema `{sink.schema}`)" for sink in pipeline.sinks)
    return (
        f"### Pipeline {pipeline.name}\n\nCopies from {pipeline.reads.type} to {sinks}, and applies each change"
        f" exactly once:\n\n{tables}\n{_STEPS}"
    )
