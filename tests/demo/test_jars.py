"""Jars that Spark's resolver fetches for the demo, the tests and the benchmarks must match their checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from airflow_cdc_provider.engine.sinks.delta.settings import PACKAGE as DELTA
from airflow_cdc_provider.engine.sources.kafka.settings import PACKAGE as TOPICS
from benchmarks.lab import JDBC
from benchmarks.peers.debezium import _PACKAGES as DEBEZIUM
from benchmarks.peers.flink import _PACKAGES as FLINK
from benchmarks.peers.flink_join import _PACKAGES as FLINK_SQL
from local_servers import jars
from local_servers.jars import SUMS, JarsMissing, fetch, require_known
from local_servers.kafka import PACKAGE as KAFKA


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a jar with a known checksum, in a folder like the resolver's."""
    jar = tmp_path / ".ivy2.5.2" / "jars" / "g_a-1.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"right")
    sums = tmp_path / "sums"
    sums.write_text(f"{hashlib.sha256(b'right').hexdigest()}  g_a-1.jar\n")
    monkeypatch.setattr(jars, "SUMS", sums)
    return jar


def test_another_jar_is_refused_and_removed(one: Path) -> None:
    require_known([one])
    unknown = one.with_name("g_b-1.jar")
    unknown.write_bytes(b"right")
    for jar in (one, unknown):
        jar.write_bytes(b"wrong" if jar == one else b"right")
        with pytest.raises(JarsMissing, match=jar.name):
            require_known([jar])
        assert not jar.exists()


def test_what_is_resolved_is_checked(tmp_path: Path, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one.unlink()
    monkeypatch.setattr(jars, "_resolve", lambda package, home: one.write_bytes(b"wrong"))
    for _ in range(2):
        with pytest.raises(JarsMissing, match=r"g_a-1\.jar does not match its checksum"):
            fetch("g:a:1", tmp_path)
    monkeypatch.setattr(jars, "_resolve", lambda package, home: one.write_bytes(b"right"))
    assert fetch("g:a:1", tmp_path) == [one]


@pytest.mark.parametrize("package", [KAFKA, DELTA, TOPICS, JDBC, *DEBEZIUM, *FLINK, *FLINK_SQL])
def test_the_sum_of_each_package_is_known(package: str) -> None:
    group, artifact, version = package.split(":")
    assert f"  {group}_{artifact}-{version}.jar\n" in SUMS.read_text()
