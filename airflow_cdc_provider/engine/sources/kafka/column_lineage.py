"""Which columns of a query's result are columns of the messages as they stand, and with which ones it computes.

A value that a message leaves out can be kept in the target only if the query passes it on. One that it computes with,
in a condition as in an expression, is not there to be computed with. What is not sure to be passed on, as through a
union, counts as computed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.sources.kafka.settings import VIEW

_PASSING = frozenset(
    {"Filter", "SubqueryAlias", "View", "EventTimeWatermark", "Sort", "ResolvedHint", "Generate", "Join"}
)


@dataclass(frozen=True)
class Lineage:
    """Where the columns of a result come from.

    :param passed: the column of the view that a column of the result is.
    :param computed: columns of the view that the query computes with.
    :param stateful: the query keeps state, out of which nothing can be taken any more.
    """

    passed: Mapping[str, str] = field(default_factory=dict)
    computed: frozenset[str] = frozenset()
    stateful: bool = False


def lineage_of(rows: DataFrame, names: frozenset[str]) -> Lineage:
    """Find it in the plan of a query.

    :param names: the view's columns.
    """
    plan = rows._jdf.queryExecution().analyzed()
    computed: set[str] = set()
    found = _trace(plan, computed)
    if not found and not computed:  # the view is in a subquery, or nothing of it is used
        return Lineage({}, names)
    passed = {each.name(): found[_id(each)] for each in _items(plan.output()) if _id(each) in found}
    return Lineage(passed, frozenset(computed) & names)


def _trace(node: Any, computed: set[str]) -> dict[int, str]:
    """Return which ids of a node's output are columns of the view."""
    name = str(node.nodeName())
    if name == "SubqueryAlias" and str(node.alias()).lower() == VIEW:
        return {_id(each): str(each.name()) for each in _items(node.output())}
    known: dict[int, str] = {}
    for child in _items(node.children()):
        known |= _trace(child, computed)
    if name == "Project":
        return _projected(node, known, computed)
    if name not in _PASSING and name != "Aggregate":
        computed.update(known.values())
        return {}
    for expression in _items(node.expressions()):
        computed.update(_used(expression, known))
    return {} if name == "Aggregate" else known


def _projected(node: Any, known: Mapping[int, str], computed: set[str]) -> dict[int, str]:
    made = {}
    for item in _items(node.projectList()):
        inner = item
        while str(inner.nodeName()) == "Alias":
            inner = inner.child()
        if str(inner.nodeName()) == "AttributeReference" and _id(inner) in known:
            made[_id(item)] = known[_id(inner)]
        else:
            computed.update(_used(inner, known))
    return made


def _used(expression: Any, known: Mapping[int, str]) -> Iterator[str]:
    return (known[_id(each)] for each in _items(expression.references().toSeq()) if _id(each) in known)


def _id(attribute: Any) -> int:
    return int(attribute.exprId().id())


def _items(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(place) for place in range(sequence.size()))
