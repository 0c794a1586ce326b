"""Large values that an update does not change, which Postgres does not send, through all that can happen to a row.

Every sequence of three operations happens to some row, at every choice of moments: before the chunks are read, between
them, after them in the first unit, and in the next unit. Each row has two large values: some operations change one of
them, and only an insert changes the other. So each kind of mistake leaves a wrong value behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest

from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Mode = Literal["mirror", "changelog"]

HIGH = 1_000_000  # keys from here on belong to the second chunk
MOMENTS = range(4)
UNKNOWN = "?"
LARGE = "rpad('{} ' || r, 2100, md5(r::text))"
CHANGES = {
    "small": "UPDATE t SET small = small + 1 WHERE r = ANY (:rows)",
    "large": f"UPDATE t SET large = {LARGE.format('new')} || small, small = small + 1 WHERE r = ANY (:rows)",
    "null": "UPDATE t SET large = NULL WHERE r = ANY (:rows)",
    "near": "UPDATE t SET id = id # 1 WHERE r = ANY (:rows)",
    "far": f"UPDATE t SET id = (id + {HIGH}) % {2 * HIGH} WHERE r = ANY (:rows)",
    "delete": "DELETE FROM t WHERE r = ANY (:rows)",
    "insert": (
        f"INSERT INTO t SELECT r * 2 + r % 2 * {HIGH}, r, 100, {LARGE.format('again')}, {LARGE.format('anew')}"
        " FROM unnest(:rows) r"
    ),
}
CREATE = (
    "CREATE TABLE t (id int PRIMARY KEY, r int NOT NULL, small int, large text, steady text)",
    # Unchanged, uncompressed and out of line, so that a little more than 2 kB is enough.
    "ALTER TABLE t ALTER large SET STORAGE EXTERNAL, ALTER steady SET STORAGE EXTERNAL",
)
IDENTITIES = {
    "default": (),
    "full": ("ALTER TABLE t REPLICA IDENTITY FULL",),
    "index": (
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (r)",
        "CREATE UNIQUE INDEX by_id ON t (id)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id",
    ),
}


@dataclass(frozen=True)
class Fate:
    """The operations on a row, and their moments."""

    operations: tuple[str, ...]
    moments: tuple[int, ...]


def fates() -> Iterator[Fate]:
    """Return every possible sequence of three operations, at every choice of moments."""
    for operations in itertools.product(CHANGES, repeat=3):
        states = itertools.accumulate(operations, lambda alive, o: o != "delete", initial=True)
        if all((operation == "insert") != alive for operation, alive in zip(operations, states, strict=False)):
            for moments in itertools.combinations_with_replacement(MOMENTS, 3):
                yield Fate(operations, moments)


FATES = list(fates())


def happen(dsn: str, moment: int, *, together: bool) -> None:
    """Execute the operations of a moment, in one transaction or in one for each operation."""
    with psycopg.connect(dsn, autocommit=not together) as connection:
        for place, (operation, statement) in itertools.product(range(3), CHANGES.items()):
            rows = [
                row
                for row, fate in enumerate(FATES)
                if (fate.moments[place], fate.operations[place]) == (moment, operation)
            ]
            if rows:
                literal = f"'{{{','.join(map(str, rows))}}}'::int[]"
                connection.execute(statement.replace(":rows", literal).encode())


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_every_fate_of_large_values(databases: Databases, tmp_path: Path, identity: str, mode: Mode) -> None:
    count = len(FATES)
    pipeline = PipelineUnderTest(
        tmp_path, databases, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": (count + 1) // 2}
    )
    statement = CHANGES["insert"].replace("unnest(:rows) r", f"generate_series(0, {count - 1}) r")
    pipeline.source(*CREATE, *IDENTITIES[identity], statement)
    pipeline.provision()
    together = identity == "default"
    happen(databases.source, 0, together=together)
    pipeline.copy(0)
    happen(databases.source, 1, together=together)
    pipeline.copy(1)
    happen(databases.source, 2, together=together)
    pipeline.apply()
    assert_values(pipeline, mode)
    happen(databases.source, 3, together=together)
    pipeline.apply()
    assert_values(pipeline, mode)


def assert_values(pipeline: PipelineUnderTest, mode: Mode) -> None:
    """Check that the target has the source's values; a changelog may lack those that it marks as missing."""
    pipeline.assert_verified()
    columns = "id, r, small, md5(large), md5(steady)"
    ours = {row[0]: row for row in pipeline.source_rows(f"SELECT {columns} FROM t")}
    if mode == "mirror":
        assert {row[0]: row for row in pipeline.target_rows(f"SELECT {columns} FROM t")} == ours
        return
    theirs: dict[int, tuple[Any, ...]] = {}
    query = f"SELECT _op::text, (_before ->> 'id')::int, _unchanged, {columns} FROM t ORDER BY _commit_lsn, _seq"
    for op, before, unchanged, *row in pipeline.target_rows(query):
        earlier = theirs.pop(before if before is not None else row[0], None)
        if op == "d":
            continue
        # The row marks the values that it lacks, which it had before. Only the value of a move out of a chunk read
        # later is unknown.
        for name, place in (("large", 3), ("steady", 4)):
            if name in (unchanged or ()):
                assert row[place] is None
                row[place] = earlier[place] if earlier is not None else UNKNOWN
        theirs[row[0]] = tuple(row)
    assert theirs.keys() == ours.keys()
    for key, row in theirs.items():
        if UNKNOWN in row:
            fate = FATES[row[1]]
            assert ("far", 1) in zip(fate.operations, fate.moments, strict=True), fate
        assert all(cell in (value, UNKNOWN) for cell, value in zip(row, ours[key], strict=True)), (row, ours[key])


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL", "USING INDEX by_key"])
def test_a_key_that_is_large_itself(databases: Databases, tmp_path: Path, identity: str, mode: Mode) -> None:
    """An update of another column leaves out the key too, and sends it as the old key."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"], sink={"mode": mode}, snapshot={"chunk_rows": 2})
    key = "rpad(n::text, 2400, md5(n::text))"
    pipeline.source(
        "CREATE TABLE t (k text NOT NULL, n int NOT NULL, v int, PRIMARY KEY (k, n))",
        "ALTER TABLE t ALTER k SET STORAGE EXTERNAL",
        "CREATE UNIQUE INDEX by_key ON t (k)",
        f"ALTER TABLE t REPLICA IDENTITY {identity}",
        f"INSERT INTO t SELECT {key}, n, 0 FROM generate_series(1, 4) n",
    )
    pipeline.provision()
    pipeline.copy(0)
    pipeline.source("UPDATE t SET v = 1")
    pipeline.copy(1)
    pipeline.source(
        f"INSERT INTO t SELECT {key}, n, 0 FROM generate_series(5, 6) n",
        "UPDATE t SET v = 2 WHERE n IN (1, 3, 5)",
        "UPDATE t SET n = n + 10 WHERE n IN (1, 2, 6)",
        "UPDATE t SET k = k || 'x', v = 3 WHERE n IN (3, 11)",
        "DELETE FROM t WHERE n IN (4, 5)",
    )
    pipeline.apply()
    pipeline.assert_verified()
    if mode == "mirror":
        pipeline.assert_equal()
