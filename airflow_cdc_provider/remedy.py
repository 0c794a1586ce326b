"""Adapts remedies of the engine for users of Airflow, who may have a Dag that does the same as a command."""

from __future__ import annotations

import re

# Longer commands come first.
_DAGS = {
    "resnapshot --all": "the Dag `cdc_resnapshot` with Everything",
    "resnapshot": "the Dag `cdc_resnapshot` with Tables",
    "verify": "the Dag `cdc_verify`",
    "drop": "the Dag `cdc_drop`",
}


def in_airflow(solution: str) -> str:
    """Return a remedy that also names the Dag for its first command, unless it already names a Dag."""
    found = (" ".join(text.split()) for text in re.findall(r"`airflow-cdc\s+([^`]+)`", solution))  # it may be wrapped
    commands = [text for text in found if text.startswith(tuple(_DAGS))]
    if not commands or re.search(r"\bDag\b", solution):
        return solution
    dag = next(dag for command, dag in _DAGS.items() if commands[0].startswith(command))
    return f"{solution} In Airflow, trigger {dag}."
