"""A pipeline that reads tables as one role and the log as another: neither may do what the other does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import CdcError, ConfigError, LoginRefused, MissingPrivilege
from airflow_cdc_provider.engine.pipeline.pipeline import Pipeline
from airflow_cdc_provider.engine.sources.postgres.provision.slot_session import reader_of
from airflow_cdc_provider.engine.sources.postgres.wal.wal_reader import WalReader
from tests.conftest import Databases
from tests.support.databases import execute
from tests.support.pipelines import PipelineUnderTest
from tests.support.sparkless import DONE, SparklessRun


@pytest.fixture
def roles(databases: Databases) -> Iterator[dict[str, str]]:
    """Return the DSNs of a pipeline's two roles in the source, which are not superusers."""
    name = databases.source.rpartition("/")[2]
    reader, replicator = f"reader_{name}", f"replicator_{name}"
    execute(
        databases.source,
        f"CREATE ROLE {reader} LOGIN IN ROLE app",
        f"CREATE ROLE {replicator} LOGIN REPLICATION",
        f"GRANT CREATE ON DATABASE {name} TO {reader}",
        "CREATE TABLE public.t (id int PRIMARY KEY, v text)",
        "INSERT INTO public.t SELECT n, 'row ' || n FROM generate_series(1, 100) n",
    )
    yield {
        key: databases.source.replace("postgres@", f"{role}@")
        for key, role in (("dsn", reader), ("replication_dsn", replicator))
    }
    execute(databases.source, f"DROP OWNED BY {reader}, {replicator}", f"DROP ROLE {reader}", f"DROP ROLE {replicator}")


@pytest.fixture
def pipeline(databases: Databases, roles: dict[str, str], tmp_path: Path) -> PipelineUnderTest:
    return PipelineUnderTest(tmp_path, databases, ["public.t"], source=roles, sink={"schema": "copy"})


def test_a_pipeline_lives_with_two_roles(pipeline: PipelineUnderTest) -> None:
    """From its first check to its removal, including a walsender that it has to end."""
    names = pipeline.pipeline.source
    assert all(finding.ok for finding in preflight(pipeline.pipeline))
    pipeline.provision()
    pipeline.copy()
    pipeline.source("UPDATE public.t SET v = 'changed' WHERE id % 2 = 0", "DELETE FROM public.t WHERE id % 10 = 0")
    assert SparklessRun(pipeline.file).wait() == DONE
    rows = "SELECT id, v FROM {}.t ORDER BY id"
    assert pipeline.target_rows(rows.format("copy")) == pipeline.source_rows(rows.format("public"))
    pipeline.assert_verified()
    active = (
        "SELECT usename::text, application_name FROM pg_stat_replication"
        f" WHERE pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{names.slot}')"
    )
    left = WalReader(names.log_dsn, names.slot, names.publication, pipeline.confirmed())
    try:
        replicator = names.replication_dsn.partition("//")[2].partition("@")[0]
        assert pipeline.source_rows(active) == [(replicator, reader_of(names))]
        pipeline.provision()
        assert pipeline.source_rows(active) == []
    finally:
        left.close()
    commands.resnapshot(pipeline.pipeline, tables=["public.t"])
    commands.drop(pipeline.pipeline)
    assert pipeline.source_rows(f"SELECT FROM pg_replication_slots WHERE slot_name = '{names.slot}'") == []


def test_each_role_is_checked(pipeline: PipelineUnderTest, databases: Databases, roles: dict[str, str]) -> None:
    """Preflight names the role that lacks a privilege."""

    def found(**source: str) -> dict[str, CdcError]:
        pipeline.change(source=roles | source)
        return {finding.check: finding.error for finding in preflight(pipeline.pipeline) if finding.error}

    reader = roles["dsn"].partition("//")[2].partition("@")[0]
    replicator = roles["replication_dsn"].partition("//")[2].partition("@")[0]
    (swapped,) = found(replication_dsn=roles["dsn"]).values()
    assert isinstance(swapped, MissingPrivilege)
    assert f"ALTER ROLE {reader} WITH REPLICATION" in swapped.solution
    unread = found(dsn=roles["replication_dsn"])
    assert isinstance(unread["select"], MissingPrivilege)
    assert replicator in unread["select"].message
    unknown = found(replication_dsn=roles["replication_dsn"].replace(replicator, "nobody_at_all"))
    assert isinstance(unknown["replication"], LoginRefused)
    elsewhere = found(replication_dsn=roles["replication_dsn"].rpartition("/")[0] + "/postgres")
    assert isinstance(elsewhere["replication"], ConfigError)
    assert "another server or database" in elsewhere["replication"].message
    execute(databases.source, "REVOKE EXECUTE ON FUNCTION pg_replication_slot_advance(name, pg_lsn) FROM PUBLIC")
    assert replicator in found()["functions"].message
    execute(databases.source, f"GRANT EXECUTE ON FUNCTION pg_replication_slot_advance(name, pg_lsn) TO {replicator}")
    assert found() == {}


DOCUMENT = {
    "pipeline": "p",
    "source": {"dsn": "postgresql://u@h/s", "tables": ["public.t"]},
    "sink": {"dsn": "postgresql://u@h/t"},
    "state": "/tmp/p",
}


def parse(environment: dict[str, str] | None = None, **source: Any) -> Pipeline:
    return Pipeline.parse(DOCUMENT | {"source": {**DOCUMENT["source"], **source}}, environment or {})  # type: ignore[dict-item]


def test_keys_of_the_file() -> None:
    assert parse().source.log_dsn == "postgresql://u@h/s"
    other = "postgresql://r:hidden@h/s"
    given = parse(replication_dsn=other).source
    assert (given.dsn, given.log_dsn) == ("postgresql://u@h/s", other)
    assert parse({"AIRFLOW_CONN_LOG": other}, replication_conn_id="log").source.log_dsn == other
    with pytest.raises(ConfigError, match="both replication_dsn and replication_conn_id"):
        parse({"AIRFLOW_CONN_LOG": other}, replication_conn_id="log", replication_dsn=other)
    with pytest.raises(ConfigError, match="AIRFLOW_CONN_LOG is not set"):
        parse(replication_conn_id="log")


def test_its_password_is_no_less_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(replication_dsn="mysql://r:hidden@h/s")
    assert "hidden" not in f"{refused.value.message} {refused.value.solution}"
    source = parse(replication_dsn="postgresql://r:hidden@h/s").source
    assert "hidden" not in repr(source)
    assert "hidden" in source.secrets


def test_airflow_resolves_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_cdc_provider.hooks.cdc import load_pipeline

    file = tmp_path / "pipeline.yaml"
    file.write_text(json.dumps(DOCUMENT | {"source": {"conn_id": "a", "replication_conn_id": "b", "tables": ["t.t"]}}))
    monkeypatch.setenv("AIRFLOW_CONN_A", "postgres://reader@h/s")
    monkeypatch.setenv("AIRFLOW_CONN_B", "postgres://log@h/s")
    loaded = load_pipeline(file)
    assert loaded.pipeline.source.dsn == "postgresql://reader@h/s"
    assert loaded.pipeline.source.log_dsn == "postgresql://log@h/s"
    assert loaded.environment["AIRFLOW_CONN_B"] == "postgresql://log@h/s"
