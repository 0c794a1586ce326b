"""Submissions for tests: a state, and jobs that are recorded as submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine.core.errors import StateUnwritable
from airflow_cdc_provider.engine.state import submission
from airflow_cdc_provider.engine.state.files import State
from airflow_cdc_provider.engine.state.heartbeat import Heartbeat, Owner
from airflow_cdc_provider.engine.state.submission import Submission

HERE = Owner.this()


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(f"file://{tmp_path}/state")


def submitted(state: State, part: str = "stream", **values: Any) -> Submission:
    """Record a submission in the state."""
    new = replace(Submission.new("shop", part, [part]), **values)
    submission.write(state, new)
    return new


def beat(of: Submission | None, owner: Owner = HERE, at: float = 0.0, **progress: Any) -> Heartbeat:
    return Heartbeat(owner, of.part if of else "stream", 7, at, False, progress, of.id if of else None)


def failing(method: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Return a method that fails as many times as a state that cannot be reached."""
    left = [StateUnwritable("out of reach", "Wait.")] * times

    def called(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return method(*arguments)

    return called
