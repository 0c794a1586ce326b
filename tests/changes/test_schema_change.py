"""The consequences of a changed definition, decided without a server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from airflow_cdc_provider.engine.changes.redefinition import (
    has_other_keys,
    has_unlogged_identity_changes,
    has_unlogged_key_changes,
    may_have_missed_changes,
    redefinition,
)
from airflow_cdc_provider.engine.changes.schema_change import (
    FollowChange,
    FormatChange,
    Refuse,
    Reread,
    Unchanged,
    decide,
    first_format_change,
    fits,
)
from airflow_cdc_provider.engine.core.errors import CannotFollow, CdcError
from airflow_cdc_provider.engine.core.mvcc_snapshot import Snapshot
from airflow_cdc_provider.engine.core.row_changes import Changes, Relation, RelationColumn
from airflow_cdc_provider.engine.core.table import Column, Leaf, Table

TYPES = {"int": (23, -1), "bigint": (20, -1), "text": (25, -1), "varchar(5)": (1043, 9), "varchar(9)": (1043, 13)}


def table(spec: str, file: int = 1, **values: object) -> Table:
    """Return a table from ``1id:int 2a:text``: numbers, names and types; ``!`` marks a later version of the entry."""
    columns = []
    for part in spec.split():
        name, _, kind = part.partition(":")
        kind, touched, _ = kind.partition("!")
        oid, modifier = TYPES[kind]
        numbers = {"attnum": int(name[0]), "type_modifier": modifier}
        columns.append(Column(name[1:], kind, oid, None, False, True, xmin=touched, **numbers))
    leaves = (Leaf(7, "public", "t", file),)
    made = Table(7, "public", "t", tuple(columns), (columns[0].name,), "d", None, leaves, "r")
    return replace(made, **{"attnums": max(c.attnum for c in columns), **values})  # type: ignore[arg-type]


def relation(defined: Table) -> Relation:
    """Return the description of a table in the log."""
    columns = (RelationColumn(c.name, c.type_oid, c.type_modifier, c.name in defined.key) for c in defined.columns)
    return Relation(7, defined.schema, defined.name, defined.replica_identity, tuple(columns))


BEFORE = table("1id:int 2a:int 3b:varchar(5)")


def made_of(column: str, **parts: str) -> Table:
    """Return the table, with a column type that is based on different types."""
    return replace(BEFORE, columns=tuple(replace(c, parts=parts) if c.name == column else c for c in BEFORE.columns))


CASES: list[tuple[str, Table | CdcError, type]] = [
    ("nothing", BEFORE, Unchanged),
    ("added", table("1id:int 2a:int 3b:varchar(5) 4c:int"), FollowChange),
    ("dropped", table("1id:int 3b:varchar(5)", attnums=3), FollowChange),
    ("renamed", table("1id:int 2x:int 3b:varchar(5)"), FollowChange),
    ("widened", table("1id:int 2a:int 3b:varchar(9)"), FollowChange),
    ("another type, not rewritten", table("1id:int 2a:int 3b:text"), FollowChange),
    ("key renamed", table("1ident:int 2a:int 3b:varchar(5)"), FollowChange),
    ("added and dropped", table("1id:int 3b:varchar(5) 4c:int"), Reread),
    ("added after one that is gone again", table("1id:int 2a:int 3b:varchar(5) 5c:int"), Reread),
    ("replaced", table("1id:int 2a:int 4b:varchar(5)"), Reread),
    ("swapped", table("1id:int 2b:int 3a:varchar(5)"), Reread),
    ("renamed, and the name taken", table("1id:int 2x:int 3b:varchar(5) 4a:int"), Reread),
    ("rewritten and added", table("1id:int 2a:int 3b:varchar(5) 4c:int", file=2), Reread),
    ("another type", table("1id:int 2a:bigint 3b:varchar(5)", file=2), Reread),
    ("key of another type", table("1id:bigint 2a:int 3b:varchar(5)", file=2), Reread),
    ("rewritten with a touched column", table("1id:int 2a:int!9 3b:varchar(5)", file=2), Reread),
    ("only a touched column", table("1id:int 2a:int!9 3b:varchar(5)"), FollowChange),
    ("vacuumed or truncated", table("1id:int 2a:int 3b:varchar(5)", file=2), FollowChange),
    ("partitions", replace(BEFORE, leaves=(Leaf(7, "public", "t", 1), Leaf(8, "public", "u", 1))), Reread),
    ("key", replace(BEFORE, key=("a",)), Refuse),
    ("key grown", replace(BEFORE, key=("id", "a")), Refuse),
    ("identity", replace(BEFORE, replica_identity="f"), Refuse),
    ("recreated", replace(BEFORE, oid=9), Refuse),
    ("condition", replace(BEFORE, where="a > 0"), Refuse),
    ("column list", replace(BEFORE, column_list=True), Refuse),
    ("gone", CannotFollow("public.t has been dropped", "Take it out."), Refuse),
]


@pytest.mark.parametrize(("case", "after", "verdict"), CASES, ids=[case for case, _, _ in CASES])
def test_the_catalog_alone(case: str, after: Table | CdcError, verdict: type) -> None:
    found = decide(BEFORE, after)
    assert isinstance(found, verdict)
    if isinstance(found, Refuse):
        assert found.message
        assert found.solution


@pytest.mark.parametrize(("case", "after", "verdict"), CASES, ids=[case for case, _, _ in CASES])
def test_the_catalog_and_the_log(case: str, after: Table | CdcError, verdict: type) -> None:
    """The log decides nothing that contradicts the catalog; if they differ, the table is re-read."""
    if isinstance(after, Table) and not fits(BEFORE, relation(after)):
        assert isinstance(decide(BEFORE, after, relation(after)), verdict)
    stale = relation(table("1id:int 2a:int 3b:varchar(5) 4unheard:text"))
    expected = Refuse if verdict is Refuse else Reread
    assert isinstance(decide(BEFORE, after, stale), expected)


def test_a_list_of_columns_that_is_edited() -> None:
    before = table("1id:int 2a:int", column_list=True, attnums=3)
    assert isinstance(decide(before, table("1id:int 2a:int 3b:int", column_list=True)), Refuse)
    assert isinstance(decide(before, table("1id:int", column_list=True, attnums=3)), Refuse)
    assert isinstance(decide(before, table("1id:int 2x:int", column_list=True, attnums=3)), FollowChange)


def test_a_column_whose_past_values_differ_between_leaves() -> None:
    after = table("1id:int 2a:int 3b:varchar(5) 4c:int")
    *kept, added = after.columns
    assert isinstance(decide(BEFORE, replace(after, columns=(*kept, replace(added, uniform=False)))), Reread)


LEAF = Leaf(7, "public", "t", 1, 90, "5 6/7")
AWAY: list[tuple[str, Leaf, Leaf, bool]] = [
    ("nothing", LEAF, LEAF, False),
    ("vacuumed", LEAF, replace(LEAF, filenode=2), False),
    ("rewritten", LEAF, replace(LEAF, filenode=2, toast=91), True),
    ("rewritten, and all of it streamed", LEAF, replace(LEAF, filenode=2, toast=91, streamed=True), False),
    ("no TOAST table", replace(LEAF, toast=0), replace(LEAF, toast=0, filenode=2), True),
    ("a first TOAST table", replace(LEAF, toast=0), LEAF, False),
    ("moved", LEAF, replace(LEAF, place="8 6/7"), True),
    ("attached again", LEAF, replace(LEAF, place="5 6/8"), True),
    ("an old record", Leaf(7, "public", "t", 1), replace(LEAF, filenode=2), False),
]


@pytest.mark.parametrize(("case", "before", "after", "away"), AWAY, ids=[case for case, *_ in AWAY])
def test_a_leaf_whose_changes_may_be_missing(case: str, before: Leaf, after: Leaf, away: bool) -> None:
    assert may_have_missed_changes(before, after) is away
    found = decide(replace(BEFORE, leaves=(before,)), replace(BEFORE, leaves=(after,)))
    assert isinstance(found, Reread if away else (Unchanged if before is after else FollowChange))


def test_what_makes_one_definition_the_other() -> None:
    change = redefinition(BEFORE, table("1id:int 2b:bigint 4c:int"))
    assert change.renamed == (("a", "b"),)
    assert change.dropped == ("b",)
    assert [column.name for column in change.added] == ["c"]
    assert [column.name for column in change.retyped] == ["b"]
    assert change.replaced == ("b",)
    assert not change.key
    assert not redefinition(BEFORE, BEFORE).changes_columns


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (made_of("a", label1="sad", label2="ok"), made_of("a", label1="sad", label2="fine"), Reread),
        (made_of("a", label1="sad"), made_of("a", label1="sad", label2="fine"), FollowChange),
        (made_of("a", label1="sad"), made_of("a"), Reread),
        (made_of("a", label1="sad"), made_of("a", label1="sad"), Unchanged),
        (BEFORE, made_of("a", label1="sad"), FollowChange),
        (made_of("a", label1="sad"), table("1id:int 3b:varchar(5)", attnums=3), FollowChange),
    ],
)
def test_what_types_are_made_of(before: Table, after: Table, verdict: type) -> None:
    """A record without this information is accepted as it is."""
    assert isinstance(decide(before, after), verdict)
    assert not has_other_keys(before, after)


def test_what_the_type_of_a_key_is_made_of() -> None:
    before, after = made_of("id", label1="ok"), made_of("id", label1="fine")
    assert has_other_keys(before, after)
    assert not has_other_keys(BEFORE, after)
    assert has_unlogged_identity_changes(before)
    assert not has_unlogged_identity_changes(BEFORE)
    assert not has_unlogged_key_changes(before)


@pytest.mark.parametrize(
    ("described", "fitting"),
    [
        (BEFORE, True),
        (table("1id:int 3b:varchar(5) 2a:int"), False),
        (table("1id:int 2a:int 3b:varchar(9)"), False),
        (table("1id:int 2a:int"), False),
        (table("1id:bigint 2a:int 3b:varchar(5)"), False),
        (replace(BEFORE, name="u"), False),
        (replace(BEFORE, schema="other"), False),
        (replace(BEFORE, key=("a",)), False),
        (replace(BEFORE, replica_identity="f"), False),
    ],
)
def test_whether_changes_fit(described: Table, fitting: bool) -> None:
    assert fits(BEFORE, relation(described)) == fitting


def test_columns_that_are_published_and_not_captured() -> None:
    """The publication belongs to another owner."""
    more = relation(table("1id:int 2a:int 3b:varchar(5) 4c:int"))
    assert fits(table("1id:int 3b:varchar(5)", column_list=True), more)
    assert not fits(table("1id:int 3b:text", column_list=True), more)
    assert not fits(table("1id:int 5d:int", column_list=True), more)
    assert fits(replace(BEFORE, generated=("c",)), more)
    assert not fits(replace(BEFORE, generated=("d",)), more)


def test_partitions_have_names_and_orders_of_their_own() -> None:
    root = replace(BEFORE, kind="p")
    assert fits(root, relation(replace(table("1id:int 3b:varchar(5) 2a:int"), name="t_1")))
    assert not fits(root, relation(table("1id:int 3b:varchar(5)")))


def changes(described: Table, *transactions: tuple[int, int]) -> Changes:
    """Return inserts, one per transaction: id and commit LSN."""
    count = len(transactions)
    xids, lsns = (np.array(column, np.int64) for column in zip(*transactions, strict=True))
    zeros = np.zeros(count, np.int64)
    return Changes(
        relation(described), zeros, np.full(count, ord("i"), np.uint8), xids, lsns, zeros, zeros, (), {}, None,
        np.zeros(count, np.uint8),
    )  # fmt: skip


def test_the_first_changes_that_do_not_fit() -> None:
    older, newer = table("1id:int 2a:int"), table("1id:int 2a:int 3b:varchar(5) 4c:int")
    seen = Snapshot(20, 20)
    fitting = changes(BEFORE, (10, 100), (30, 500))
    tables = {7: (BEFORE,)}

    def first(*decoded: Changes, snapshots: tuple[Snapshot, ...] = (seen,), opened: int = 0) -> FormatChange | None:
        return first_format_change(decoded, tables, {"public.t": snapshots}, opened)

    assert first(fitting) is None
    assert first(changes(older, (11, 90), (12, 91))) is None, "the table has been read again after them"
    assert first(changes(older, (11, 90)), snapshots=()) == FormatChange("public.t", 90, relation(older), False)
    assert first(changes(older, (11, 90)), snapshots=(seen, Snapshot(5, 5))) is not None
    found = first(fitting, changes(newer, (31, 600)), changes(older, (12, 91), (32, 400)), opened=400)
    assert found == FormatChange("public.t", 400, relation(older), True)
    assert first_format_change([changes(newer, (31, 600))], {}, {}, 0) is None, "published, but not captured"
