"""Owners of jobs that are gone or elsewhere, and reasons for which a job was lost."""

from __future__ import annotations

from dataclasses import replace

# isort: split
from airflow_cdc_provider.engine.core.errors import (
    Fenced,
    SparkLost,
)
from airflow_cdc_provider.engine.state.submission import (
    as_outcome,
)
from tests.support.submissions import HERE

LOST = as_outcome(SparkLost("the JVM is gone", "Start again."))


FENCED = as_outcome(Fenced("overtaken", "Nothing to do."))


DEAD = replace(HERE, started=1)


ELSEWHERE = replace(HERE, host="elsewhere")
