"""Finds which columns of a query's result are unchanged columns of the messages, and which columns the query computes
with.

A value that a message omits can be kept in the target only if the query passes it on. The query cannot compute with it,
in a condition or in an expression. A column counts as computed with unless it is certain to be passed on; after a
union, for example, it is not certain.
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
    """The origin of the columns of a result.

    :param passed: by column of the result, the column of the view that it passes on.
    :param computed: columns of the view that the query computes with.
    :param stateful: the query keeps state, from which nothing can be removed again.
    """

    passed: Mapping[str, str] = field(default_factory=dict)
    computed: frozenset[str] = frozenset()
    stateful: bool = False


def lineage_of(rows: DataFrame, names: frozenset[str]) -> Lineage:
    """Find the lineage in the plan of a query.

    :param names: the view's columns.
    """
    plan = rows._jdf.queryExecution().analyzed()
    computed: set[str] = set()
    found = _trace(plan, computed)
    if not found and not computed:  # the view is in a subquery, or none of its columns is used
        return Lineage({}, names)
    passed = {each.name(): found[_id(each)] for each in _items(plan.output()) if _id(each) in found}
    return Lineage(passed, frozenset(computed) & names)


def _trace(node: Any, computed: set[str]) -> dict[int, str]:
    """Return the view's columns by the ids of a node's output."""
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
