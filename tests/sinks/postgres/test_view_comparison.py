"""The comparison of views with their SELECTs finds the anchors that differ, and no others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping

import psycopg
import pytest

from airflow_cdc_provider.engine.sinks.postgres.sink import PostgresSink
from airflow_cdc_provider.engine.sinks.transactional.views import ViewKeeper
from local_servers.postgres import PostgresServer
from tests.conftest import create_database, drop_database
from tests.sinks.begun_sink import IDENTITY, Begun
from tests.sinks.view_cases import CHUNKS, SETTINGS, TARGETS, VIEWS, random_effects
from tests.support.postgres_store import PostgresStore

# Rows that are gone, have other values or other keys, are there twice, or have no key.
TAMPERINGS = (
    "DELETE FROM dwd.{view} WHERE random() < 0.3",
    "UPDATE dwd.{view} SET k = 1000 + k WHERE random() < 0.2",
    "UPDATE dwd.{view} SET {column} = {column} + 1 WHERE random() < 0.3",
    "UPDATE dwd.{view} SET {column} = NULL WHERE random() < 0.3",
    "INSERT INTO dwd.{view} SELECT * FROM dwd.{view} WHERE random() < 0.3",
    "UPDATE dwd.{view} SET k = NULL WHERE random() < 0.2",
)
KEYED = {"left3": TAMPERINGS[:4]}


@pytest.fixture
def begun(target_server: PostgresServer) -> Iterator[Begun]:
    """Return a pipeline with views that have changed at random."""
    create_database(target_server, "compared")
    dsn = target_server.dsn("compared")
    sink = PostgresSink(dsn, "p", "mirror", views=SETTINGS)
    sink.prepare(TARGETS, CHUNKS, IDENTITY, 100)
    begun = Begun(PostgresStore(dsn), sink, sink.take_epoch("test"))
    for target, chunk in zip(TARGETS, CHUNKS, strict=True):
        begun.copy(chunk, ("0", "1", "2", "3"), target=target)
    begun.unit(100, 200)
    keeper = ViewKeeper(sink, begun.epoch)
    while keeper.step():
        pass
    yield begun
    drop_database(target_server, "compared")


def differing(connection: psycopg.Connection[tuple[object, ...]], view: str) -> Mapping[str | None, str]:
    """Return the kinds of differences by the first column, which is the anchor."""
    stored, wanted = (
        Counter(connection.execute(query).fetchall())  # type: ignore[call-overload]
        for query in (f"SELECT * FROM dwd.{view}", VIEWS[view].replace("shop.", "copy."))
    )
    sides = [{row[0] for row in side} for side in (stored, wanted)]
    anchors = {row[0] for row in stored.keys() | wanted.keys() if stored[row] != wanted[row]}

    def kind(key: object) -> str:
        return "missing" if key not in sides[0] else "extra" if key not in sides[1] else "different"

    return {None if key is None else str(key): kind(key) for key in anchors}


def test_it_finds_what_was_tampered_with(begun: Begun) -> None:
    sink, lsn, rnd = begun.sink, 200, random.Random(5)
    assert isinstance(sink, PostgresSink)
    with psycopg.connect(sink.dsn, autocommit=True) as connection:
        connection.execute("SELECT setseed(0.5)")
        found = Counter[str]()
        for _ in range(30):
            assert sink.commit(begun.epoch, lsn, lsn + 10, [begun.piece(*random_effects(rnd))])
            lsn += 10
            results = {result.view: result for result in sink.compare_views()}
            assert all(result.as_dict()["equal"] for result in results.values()), results
            for name in VIEWS:
                column = "v" if name in ("left3", "multi") else "n"
                connection.execute(rnd.choice(KEYED.get(name, TAMPERINGS)).format(view=name, column=column))
            results = {result.view: result for result in sink.compare_views()}
            for name in VIEWS:
                wanted = differing(connection, name)
                assert {each.key["k"]: each.kind for each in results[f"dwd.{name}"].differences} == wanted, name
                assert results[f"dwd.{name}"].difference_count == len(wanted)
                found.update(wanted.values())
                connection.execute(f"TRUNCATE dwd.{name}")
                connection.execute(f"INSERT INTO dwd.{name} {VIEWS[name].replace('shop.', 'copy.')}")
        assert all(found[kind] > 20 for kind in ("missing", "extra", "different")), found
