"""A session of Spark for the commands of a module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from airflow_cdc_provider.engine.sources.kafka.settings import SPARK_CONF
from airflow_cdc_provider.engine.spark.session import spark_session
from airflow_cdc_provider.engine.spark.settings import SparkStart
from tests.support.topics import SESSION_CONF


@pytest.fixture(scope="module")
def shared_session() -> Iterator[None]:
    """Let all commands that run in this process share a session, which costs more than most of them do.

    It has the configuration of any pipeline over topics, because commands do not add their own. What the end of a
    session leaves behind, such as the state of windows, is tested without it, see ``test_restarts`` and
    ``test_crashes``. Commands that are started as processes must not find the Python that it has chosen in their
    environment.
    """
    before = set(os.environ)
    with spark_session(SparkStart("tests", "local[1]", {**SPARK_CONF, **SESSION_CONF}), "test"):
        for name in os.environ.keys() - before:
            del os.environ[name]
        yield
