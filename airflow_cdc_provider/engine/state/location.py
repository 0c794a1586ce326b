"""What lies in a pipeline's state location, and whose it is: only what the engine has written there is removed."""

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
_FILES = re.compile(r"(pipeline|ledger|error|stop|provisioning)\.json")
_FOLDERS = {
    **dict.fromkeys(("jobs", "starting", "history", "requests", "outcomes", "submissions", "stops"), _JSON),
    "engine": re.compile(r"[0-9a-f]{12}\.(jar|py)"),
    # Of each epoch; or what Spark writes, where topics are the source.
    "checkpoint": re.compile(rf"\d+|{SPARKS.pattern}"),
}
_REPLAY = re.compile(r"checkpoint-verify-[0-9a-f]{32}")
_OF_THE_DISK = re.compile(r"lost\+found|\.snapshot|\.nfs[0-9a-f]+")
"""What file systems have themselves: neither ours, nor anybody's data."""

_log = logging.getLogger(__name__)


def require_own(state: State, pipeline: str) -> None:
    """Refuse a location that holds another pipeline, or what no pipeline writes.

    :raises ConfigError: naming what is there.
    """
    refuse_others(state, pipeline)
    _, strange = _contents(state)
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise ConfigError(
            f"state {state.url} holds what no pipeline writes: {strange[0]}{more}",
            "Give the pipeline a directory of its own by `state`, or move away what is not the pipeline's.",
        )


def refuse_others(state: State, pipeline: str) -> None:
    """Refuse the location of another pipeline.

    :raises ConfigError: naming that.
    """
    owner = state.read_sound(_OWNER, _as_owner)
    if is_of_others(state, pipeline):
        raise ConfigError(
            f"state {state.url} is that of pipeline {owner!r}, not of {pipeline!r}",
            f"Give each pipeline a `state` of its own. If {owner!r} is no more, `airflow-cdc drop` it with its file, or"
            f" delete {state.url}/{_OWNER}.",
        )


def is_of_others(state: State, pipeline: str) -> bool:
    """Return whether the location is that of another pipeline."""
    return state.read_sound(_OWNER, _as_owner) not in (None, pipeline)


def take(state: State, pipeline: str) -> None:
    """Write down whose location it is."""
    if state.read_sound(_OWNER, _as_owner) is None:
        state.write(_OWNER, {"pipeline": pipeline})


def clear(state: State) -> None:
    """Remove what pipelines write there, and the folder if nothing else is in it; what stays is logged."""
    ours, strange = _contents(state)
    for name in sorted(ours):
        state.remove(name)
    for folder in (*_FOLDERS, ""):
        state.remove_empty(folder)
    if strange:
        _log.warning("%s is not removed, as it holds what no pipeline writes: %s", state.url, ", ".join(strange))


def _contents(state: State) -> tuple[list[str], list[str]]:
    """Names, relative to the location, of what pipelines write there, and of what they do not."""
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
        raise ValueError("pipeline is no name of one")
    return found
