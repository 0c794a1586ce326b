"""Decides whether tasks wait in the triggerer.

Operators and sensors of this provider defer by default, because a pipeline is watched for hours or forever. Airflow's
own default of ``[operators] default_deferrable`` is false, and Airflow writes it into ``airflow.cfg`` when it creates
the file. Therefore, only a value in the environment is known to be a decision of a user.
"""

from __future__ import annotations

import os

from airflow.sdk.configuration import conf

_VARIABLE = "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE"
# Set by the executor for Kubernetes, and by those that start another kind of container for each task, as on ECS.
_CONTAINER_VARIABLES = ("AIRFLOW_IS_K8S_EXECUTOR_POD", "AIRFLOW_IS_EXECUTOR_CONTAINER")


def default_deferrable() -> bool:
    """Return ``[operators] default_deferrable`` if the environment sets it, otherwise true."""
    return _VARIABLE not in os.environ or bool(conf.getboolean("operators", "default_deferrable"))


def container_ends_with_task() -> bool:
    """Return whether Airflow's executor has started a container for this task, which ends all processes with it."""
    return any(os.environ.get(name) for name in _CONTAINER_VARIABLES)
