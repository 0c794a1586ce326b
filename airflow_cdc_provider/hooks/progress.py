"""The progress of a running job as readable lines in a task's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_cdc_provider.engine.core.text_output import human_bytes


def progress_line(progress: Mapping[str, Any]) -> str:
    """Return the progress of a job's heartbeat as one line, without values that are not known yet."""
    parts = []
    if "restart" in progress:
        restart = progress["restart"]
        parts.append(f"attempt {restart['attempt']} of {restart['of']} follows: {restart['error']['message']}")
    if "waiting" in progress:
        parts.append(f"waiting: {progress['waiting']}")
    if "chunks" in progress:
        parts.append(f"{progress['finished']} of {progress['chunks']} chunks finished, {progress['rows']:,} rows")
    if "changes" in progress:
        parts.append(f"{progress['changes']:,} changes applied up to {progress['applied_lsn']}")
    if progress.get("rows_per_second"):
        parts.append(f"{progress['rows_per_second']:,} rows/s")
    for view in progress.get("views", ()):
        if view["state"] in ("building", "rebuilding"):
            parts.append(f"view {view['view']} is built to {view['built_percent']} %")
    lag = [human_bytes(progress["lag_bytes"])] if progress.get("lag_bytes") is not None else []
    lag += [f"{progress['lag_seconds']:.1f} s"] if progress.get("lag_seconds") is not None else []
    lag += [f"{progress['lag_messages']:,} messages"] if progress.get("lag_messages") is not None else []
    if lag:
        parts.append(f"lag {' / '.join(lag)}")
    return ", ".join(parts) or "nothing to report yet"
