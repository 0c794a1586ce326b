"""Chooses the tests of a run, and distributes them among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from zlib import crc32

import pytest

Some = Callable[[Sequence[str]], Sequence[str]]

_ONE_AFTER_THE_OTHER = (
    # They share an Airflow and a browser. When outages change the machine's network, a browser gives up its requests.
    ("tests/airflow/", "tests/protocol/outages/"),
    # They share an HDFS, whose start takes most of their time.
    (
        "tests/sinks/files/test_compaction.py",
        "tests/sinks/files/test_hdfs.py",
        "tests/sinks/files/test_sink.py",
        "tests/state/test_location.py",
    ),
    # Each group shares what takes long to start: a JVM that knows Delta Lake, or a broker and a registry of schemas.
    ("tests/sinks/delta/",),
    ("tests/sinks/kafka/", "tests/kafka/"),
    ("tests/sources/kafka/",),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which ``make test`` runs every test, but few cases of long ones."""
    parser.addoption("--thin", action="store_true", help="leave out thorough tests, and most cases of long tests")


def _process_of(nodeid: str) -> str:
    """Return the name of the group of tests that run in one process: those of a file, or of the places above."""
    return next((places[0] for places in _ONE_AFTER_THE_OTHER if nodeid.startswith(places)), nodeid.partition("::")[0])


def _is_long(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, ("spark", "airflow", "slow")))


def _thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``thorough``, and most cases of the long tests: two thirds, or all but two of many.

    This is safe for changes outside the protocol, because each test keeps other cases: of two parameters, those on a
    diagonal, and of parameters that many tests have, such as mirror and changelog, each value in some tests. Of the
    failpoints few remain.
    """
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _is_long(item) and item not in left_out:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, of_one in cases.items():
        step = 3 if len(of_one) <= 6 else 2 * ceil(len(of_one) / 4)  # even, so that of pairs not the same stay
        kept = crc32(name.encode()) % min(step, len(of_one))
        left_out |= {item for n, item in enumerate(of_one) if (n + n // step) % step != kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


# What `make test-fast` has no time for: such a server takes seconds to start, and a pair of databases half a second.
_SERVERS = {"databases", "hdfs", "kafka", "make_server", "mariadb", "mariadb_server", "registry"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need servers, and start with those that may take longest, so that all processes end together."""
    for item in items:
        if isinstance(item, pytest.Function) and not _SERVERS.isdisjoint(item.fixturenames):
            item.add_marker("servers")
    if config.getoption("thin"):
        _thin(config, items)
    longest: dict[str, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        group = _process_of(item.nodeid)
        longest[group] = max(longest.get(group, 0), limit.args[0] if limit else 0)
    items.sort(key=lambda item: -longest[_process_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Part the tests among processes in the order above."""
    from xdist.scheduler import LoadFileScheduling

    class OneAfterTheOther(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _process_of(nodeid)

    return OneAfterTheOther(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def some(pytestconfig: pytest.Config) -> Some:
    """Return a function that chooses the steps a test walks through: every third with ``--thin``, otherwise all."""
    return (lambda places: places[1::3]) if pytestconfig.getoption("thin") else (lambda places: places)
