"""Partitions and tables that move from one captured table to another, or become one themselves.

Until the table that had such a leaf has been re-read, the leaf's changes belong to both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from airflow_cdc_provider.engine import commands
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError, OlderTransactions
from airflow_cdc_provider.engine.runs.run import Run
from airflow_cdc_provider.engine.sources.postgres.reading.read_barriers import Barriers
from airflow_cdc_provider.engine.sources.postgres.reading.reread import reread_as_defined
from airflow_cdc_provider.engine.sources.postgres.stream import schema_following, unit_writer
from tests.conftest import Databases
from tests.support.changelogs import assert_same_values
from tests.support.pipelines import PipelineUnderTest

pytestmark = pytest.mark.slow

Kind = Literal["mirror", "changelog", "keyless"]

ROOT = "CREATE TABLE public.{} (id int PRIMARY KEY, body text) PARTITION BY RANGE (id)"
LEAF = "CREATE TABLE public.{} PARTITION OF public.{} FOR VALUES FROM ({}) TO ({})"
SCENE = (
    *(ROOT.format(name) for name in ("archive", "orders", "tree")),
    LEAF.format("archive_1", "archive", 0, 10),
    # One name before its root's, one after: the order of names must not decide anything.
    LEAF.format("moving", "orders", 10, 20),
    LEAF.format("z_orders", "orders", 20, 30),
    LEAF.format("tree_1", "tree", 30, 40),
    "CREATE TABLE public.loose (id int PRIMARY KEY, body text)",
    *(
        f"INSERT INTO public.{name} SELECT i, 'row ' || i FROM generate_series({first}, {first} + 7) i"
        for name, first in {"archive": 0, "orders": 10, "z_orders": 20, "tree": 30, "loose": 40}.items()
    ),
)
KEYLESS = "ALTER TABLE public.{0} DROP CONSTRAINT {0}_pkey; ALTER TABLE public.{0} REPLICA IDENTITY FULL"
DETACH = "ALTER TABLE public.{} DETACH PARTITION public.{}"
ATTACH = "ALTER TABLE public.{} ATTACH PARTITION public.{} FOR VALUES FROM ({}) TO ({})"


@dataclass(frozen=True)
class Case:
    """The steps that a leaf goes through.

    :param leaf: the leaf, whose rows change all the time.
    :param steps: each a transaction, and the tables provisioned after it; the stream continues after the last.
    :param equal: tables whose targets must equal them.
    :param rules: rules of the file.
    :param refusals: expected refusals, in order, of `provision` or of the stream; the remedy of each is carried out.
    """

    leaf: str
    steps: tuple[str, ...]
    equal: tuple[str, ...]
    rules: tuple[Any, ...] = ("public.*",)
    refusals: tuple[str, ...] = ()


MOVED = f"{DETACH.format('orders', 'moving')}; {ATTACH.format('archive', 'moving', 10, 20)}"
NAMED = ("public.archive", "public.loose", "public.orders")
BOTH = "belong to both public.orders and public.loose|belong to both public.loose and public.orders"
CASES = {
    "detached": Case("moving", (DETACH.format("orders", "moving"),), ("moving", "orders")),
    "detached, by a rule of other rows": Case(
        "moving",
        (DETACH.format("orders", "moving"),),
        ("moving", "orders"),
        ({"table": "public.orders", "where": "id <> 12"}, "public.*"),
    ),
    "detached, by a rule of other columns": Case(
        "moving",
        (DETACH.format("orders", "moving"),),
        ("moving", "archive"),
        ({"table": "public.orders", "columns": ["id"]}, "public.*"),
    ),
    "detached, and the root dropped": Case(
        "z_orders", (DETACH.format("orders", "z_orders"), "DROP TABLE public.orders"), ("z_orders",)
    ),
    "there and back": Case(
        "moving",
        (DETACH.format("orders", "moving"), ATTACH.format("orders", "moving", 10, 20)),
        ("orders",),
    ),
    "moved": Case("moving", (MOVED,), ("archive", "orders"), NAMED),
    "moved, by a rule of other rows": Case(
        "moving", (MOVED,), ("archive", "orders"), ({"table": "public.archive", "where": "id >= 0"}, *NAMED[1:])
    ),
    "attached": Case("loose", (ATTACH.format("orders", "loose", 40, 50),), ("orders",)),
    "attached, by its name": Case("loose", (ATTACH.format("orders", "loose", 40, 50),), ("orders",), NAMED, (BOTH,)),
    "attached, from a rule of other rows": Case(
        "loose",
        (ATTACH.format("orders", "loose", 40, 50),),
        ("orders",),
        ("public.orders", {"table": "public.loose", "where": "id <> 41"}),
        (BOTH,),
    ),
    "a tree attached": Case("tree_1", (ATTACH.format("orders", "tree", 30, 40),), ("orders",)),
    "the root renamed, and another in its place": Case(
        "moving",
        (
            "ALTER TABLE public.orders RENAME TO before;"
            f"{ROOT.format('orders')}; {LEAF.format('p', 'orders', 0, 90)}; INSERT INTO public.orders VALUES (7)",
        ),
        ("before", "orders"),
        refusals=("public.orders has been dropped and recreated",),
    ),
}


def make(databases: Databases, tmp_path: Path, kind: Kind, rules: tuple[Any, ...]) -> PipelineUnderTest:
    mode = "changelog" if kind == "changelog" else "mirror"
    pipeline = PipelineUnderTest(tmp_path, databases, list(rules), sink={"mode": mode})
    pipeline.source(*SCENE)
    if kind == "keyless":
        roots = ("archive", "orders", "tree", "loose")
        leaves = ("archive_1", "moving", "z_orders", "tree_1")
        pipeline.source(*(KEYLESS.format(name) for name in roots))
        pipeline.source(*(f"ALTER TABLE public.{name} REPLICA IDENTITY FULL" for name in leaves))
    start(pipeline)
    return pipeline


def start(pipeline: PipelineUnderTest, stream: bool = True, leaf: str | None = None) -> list[str]:
    """Do what ``run`` does, and what its messages demand, until it passes; return the messages.

    :param leaf: the leaf, whose rows change before the stream.
    """
    told: list[str] = []
    while True:
        try:
            pipeline.provision()
            pipeline.copy_tables()
            if leaf is not None:
                change(pipeline, leaf, 2)
            if stream:
                pipeline.apply()
            return told
        except CdcError as e:
            told.append(e.message)
            assert len(told) < 5, told
            if found := re.search(r"resnapshot --table '(.*)'`", e.solution):
                commands.resnapshot(pipeline.pipeline, tables=[found[1]])
            elif "name that one alone" in e.solution:
                rules = pipeline.document["source"]["tables"]
                pipeline.change(source={"tables": [rule for rule in rules if "loose" not in str(rule)]})
            else:
                raise


def change(pipeline: PipelineUnderTest, leaf: str, time: int) -> None:
    """Change some rows of a leaf, different ones each time."""
    pipeline.source(
        f"UPDATE public.{leaf} SET body = body || ' {time}' WHERE id % 4 = {time}",
        f"DELETE FROM public.{leaf} WHERE id % 8 = {time}",
        f"INSERT INTO public.{leaf} SELECT max(id) + 1, 'new' FROM public.{leaf} HAVING max(id) % 10 < 9",
    )


def assert_same(pipeline: PipelineUnderTest, *tables: str) -> None:
    for table in tables:
        assert_same_values(pipeline, ["id"], ["id", "body"], "public", table)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "mirror") for name in CASES),
        *((name, kind) for name in ("detached",) for kind in ("changelog", "keyless")),
    ],
)
def test_moves(databases: Databases, tmp_path: Path, name: str, kind: Kind) -> None:
    case = CASES[name]
    pipeline = make(databases, tmp_path, kind, case.rules)
    told: list[str] = []
    for step in case.steps:
        change(pipeline, case.leaf, 0)
        pipeline.source(step)
        change(pipeline, case.leaf, 1)
        told += start(pipeline, step == case.steps[-1], case.leaf)
    change(pipeline, case.leaf, 3)
    told += start(pipeline)
    assert_same(pipeline, *case.equal)
    assert len(told) == len(case.refusals), told
    for message, expected in zip(told, case.refusals, strict=True):
        assert re.search(expected, message)


def test_a_move_of_which_half_has_to_wait(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream continues between the two reads."""
    pipeline = make(databases, tmp_path, "mirror", NAMED)
    waited: list[str] = []

    def waits_once(run: Run, label: str, barriers: Barriers) -> int:
        if label == "public.orders" and not waited:
            waited.append(label)
            change(pipeline, "moving", 1)
            raise OlderTransactions("others are older", "They end.")
        return reread_as_defined(run, label, barriers)

    for module in (unit_writer, schema_following):
        monkeypatch.setattr(module, "reread_as_defined", waits_once)
    pipeline.source(MOVED)
    pipeline.apply()
    assert waited
    change(pipeline, "moving", 2)
    pipeline.apply()
    assert_same(pipeline, "archive", "orders")


@pytest.mark.parametrize("rules", [("public.*",), NAMED])
def test_a_stream_tells_what_has_been_attached(databases: Databases, tmp_path: Path, rules: tuple[str, ...]) -> None:
    """It stops with the root's target as it should be, and continues automatically if the table is detached."""
    pipeline = make(databases, tmp_path, "mirror", rules)
    change(pipeline, "loose", 0)
    pipeline.source(ATTACH.format("orders", "loose", 40, 50))
    for time in (1, 2):
        change(pipeline, "loose", time)
        with pytest.raises(CannotFollow, match=r"public\.loose has become a partition of public\.orders") as refusal:
            pipeline.apply()
    assert "Take public.loose out of source.tables" in refusal.value.solution
    assert_same(pipeline, "orders", "loose")
    pipeline.source(DETACH.format("orders", "loose"))
    change(pipeline, "loose", 3)
    assert start(pipeline) == []
    assert_same(pipeline, "orders", "loose")


def test_partitions_that_are_replaced_by_their_root(databases: Databases, tmp_path: Path) -> None:
    """The file names the tree instead of its leaves: these are no longer captured, and their rows are not lost."""
    leaves = ("public.moving", "public.z_orders")
    pipeline = make(databases, tmp_path, "mirror", leaves)
    change(pipeline, "moving", 0)
    pipeline.change(source={"tables": ["public.orders"]})
    assert start(pipeline) == []
    change(pipeline, "moving", 1)
    assert start(pipeline) == []
    assert_same(pipeline, "orders")
    assert [target.table.label for target in pipeline.record.targets] == ["public.orders"]
