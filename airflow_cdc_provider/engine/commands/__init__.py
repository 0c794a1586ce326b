"""The commands of a pipeline, one function for each, for the command line and for Airflow.

Each function takes a pipeline, is idempotent, returns plain JSON values and raises :class:`.CdcError`; only ``init``
takes a file that does not exist yet. ``run``, ``snapshot`` and ``stream`` start Spark; others do so if the source or a
sink needs it. Importing this package imports none of their modules, so that a process that only waits for a pipeline
does not load the modules for copying it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow_cdc_provider.engine.core.signals import deferred

if TYPE_CHECKING:
    from airflow_cdc_provider.engine.commands.comparing import verify
    from airflow_cdc_provider.engine.commands.copying import snapshot, unfinished
    from airflow_cdc_provider.engine.commands.drafting import init
    from airflow_cdc_provider.engine.commands.explaining import explain
    from airflow_cdc_provider.engine.commands.following import stream
    from airflow_cdc_provider.engine.commands.lifecycle import (
        drop,
        drop_views,
        findings_dict,
        maintain,
        preflight,
        skip,
        stop,
    )
    from airflow_cdc_provider.engine.commands.pipeline_status import status
    from airflow_cdc_provider.engine.commands.provisioning import provision
    from airflow_cdc_provider.engine.commands.repair import resnapshot, start_over
    from airflow_cdc_provider.engine.commands.report import Report
    from airflow_cdc_provider.engine.commands.running import run

_HOMES = {
    "Report": "report",
    "drop": "lifecycle",
    "drop_views": "lifecycle",
    "explain": "explaining",
    "findings_dict": "lifecycle",
    "init": "drafting",
    "maintain": "lifecycle",
    "preflight": "lifecycle",
    "provision": "provisioning",
    "resnapshot": "repair",
    "run": "running",
    "skip": "lifecycle",
    "snapshot": "copying",
    "start_over": "repair",
    "status": "pipeline_status",
    "stop": "lifecycle",
    "stream": "following",
    "unfinished": "copying",
    "verify": "comparing",
}

__all__ = [
    "Report",
    "drop",
    "drop_views",
    "explain",
    "findings_dict",
    "init",
    "maintain",
    "preflight",
    "provision",
    "resnapshot",
    "run",
    "skip",
    "snapshot",
    "start_over",
    "status",
    "stop",
    "stream",
    "unfinished",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with deferred():  # some modules ignore all exceptions while they are imported
        module = import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(module, name)
