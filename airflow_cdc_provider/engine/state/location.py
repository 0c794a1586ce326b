"""The contents and the owner of a pipeline's state location; only files that the engine has written are removed."""

from __future__ import annotations

import logging
import re

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.section_values import PIPELINE_NAME
from airflow_cdc_provider.engine.core.typed_json import as_type
from airflow_cdc_provider.engine.state.files import SPARKS, State

_OWNER = "pipeline.json"
_JSON = re.compile(r".+\.json")
_TEMPORARY = re.compile(r"\..+\.json\.[0-9a-f]{32}|\..+\.(jar|py)\.[0-9a-f]{32}")
_FILES = re.compile(r"(pipeline|ledger|error|stop|stopped|provisioning|verified)\.json")
_FOLDERS = {
    **dict.fromkeys(("jobs", "starting", "history", "requests", "outcomes", "submissions", "stops"), _JSON),
    "engine": re.compile(r"[0-9a-f]{12}\.(jar|py)"),
    # One folder for each epoch; or Spark's own names, if topics are the source.
    "checkpoint": re.compile(rf"\d+|{SPARKS.pattern}"),
}
_REPLAY = re.compile(r"checkpoint-verify-[0-9a-f]{32}")
_OF_THE_DISK = re.compile(r"lost\+found|\.snapshot|\.nfs[0-9a-f]+")
"""Names that file systems create themselves; they belong neither to the engine nor to users."""

_log = logging.getLogger(__name__)


def require_own(state: State, pipeline: str) -> None:
    """Refuse a location that belongs to another pipeline, or has files that no pipeline writes.

    :raises ConfigError: if it does; names the other pipeline or the files.
    """
    refuse_others(state, pipeline)
    _, strange = _contents(state)
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise ConfigError(
            f"state {state.url} has files that no pipeline writes: {strange[0]}{more}",
            "Set `state` to a directory that only this pipeline uses, or move the other files away.",
        )


def refuse_others(state: State, pipeline: str) -> None:
    """Refuse the location of another pipeline.

    :raises ConfigError: if it belongs to one; names it.
    """
    owner = state.read_sound(_OWNER, _as_owner)
    if is_of_others(state, pipeline):
        raise ConfigError(
            f"state {state.url} is that of pipeline {owner!r}, not of {pipeline!r}",
            f"Set `state` to a different location for each pipeline. If {owner!r} is not used any more, run"
            f" `airflow-cdc drop` with its file, or delete {state.url}/{_OWNER}.",
        )


def is_of_others(state: State, pipeline: str) -> bool:
    """Return whether the location belongs to another pipeline."""
    return state.read_sound(_OWNER, _as_owner) not in (None, pipeline)


def take(state: State, pipeline: str) -> None:
    """Record the pipeline as the owner of the location."""
    if state.read_sound(_OWNER, _as_owner) is None:
        state.write(_OWNER, {"pipeline": pipeline})


def clear(state: State) -> None:
    """Remove the files that pipelines write, and the folder if it is then empty; log remaining files."""
    ours, strange = _contents(state)
    for name in sorted(ours):
        state.remove(name)
    for folder in (*_FOLDERS, ""):
        state.remove_empty(folder)
    if strange:
        _log.warning(
            "%s is not removed because it has files that no pipeline writes: %s", state.url, ", ".join(strange)
        )


def _contents(state: State) -> tuple[list[str], list[str]]:
    """Return the names, relative to the location, of files that pipelines write, and of other files."""
    ours: list[str] = []
    strange: list[str] = []
    for name in state.entries("") or ():
        if name in _FOLDERS and (inner := state.entries(name)) is not None:
            for each in inner:
                known = _FOLDERS[name].fullmatch(each) or _TEMPORARY.fullmatch(each)
                (ours if known else strange).append(f"{name}/{each}")
        elif any(pattern.fullmatch(name) for pattern in (_FILES, _TEMPORARY, _REPLAY)):
            ours.append(name)
        elif not _OF_THE_DISK.fullmatch(name):
            strange.append(name)
    return ours, strange


def _as_owner(values: dict[str, object]) -> str:
    found: str = as_type(values["pipeline"], str, "pipeline")
    if not PIPELINE_NAME.fullmatch(found):
        raise ValueError("pipeline is not a valid name")
    return found
