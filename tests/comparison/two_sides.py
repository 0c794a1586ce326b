"""Two servers that are compared while changes happen between two checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from airflow_cdc_provider.engine.postgres.connection import connected
from tests.conftest import Databases
from tests.support.damages import Session


@pytest.fixture
def session(databases: Databases) -> Iterator[Session]:
    with connected(databases.source, writes=True) as source, connected(databases.target, writes=True) as target:
        yield Session(source, target)


@dataclass
class Scripted:
    """A stream whose every step the test defines."""

    step: Callable[[], object]
    answer: bool = True
    asked: list[int] = field(default_factory=list)

    def passed(self, lsn: int, timeout: float) -> bool:
        self.asked.append(lsn)
        self.step()
        return self.answer
