"""Checks that a query leaves messages in their order, by which the last one of a key is told.

A sink takes the rows of a unit in the order of Spark's tasks. As long as no shuffle moves rows between tasks, those
that come from one partition of a topic stay in the order of its offsets. Behind a shuffle they come as its blocks
arrive, so that an older row may end up as the last one of its key. Groups of an aggregate are the exception: each comes
once in a unit, so that nothing depends on their order, as long as the key tells them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.core.errors import ConfigError

_SHUFFLES = frozenset({"RepartitionByExpression", "RebalancePartitions"})
_LAST = "so that an older message of a key may win over its last one"


def require_order(rows: DataFrame, key: Collection[str], stateful: bool) -> None:
    """Refuse a query whose rows have lost their order, where the last one of a key is wanted.

    How Spark joins is decided with each batch, see :func:`require_unshuffled`.

    :param rows: what the query returns, as a stream.
    :param key: columns of the result by which its rows are told apart.
    :raises ConfigError: naming what loses the order.
    """
    plan = rows._jdf.queryExecution().analyzed()
    if stateful:
        _require_groups(plan, key)
        return
    named = next((what for node in nodes_of(plan) if (what := _shuffle(node)) is not None), None)
    if named is not None:
        raise _refusal(named)


def require_unshuffled(rows: DataFrame) -> None:
    """Refuse a batch whose rows have been shuffled: how Spark joins may change with the size of what it joins.

    :param rows: of a batch, from a query without state.
    :raises ConfigError: when they were.
    """
    if "ShuffledRowRDD" in str(rows._jdf.queryExecution().toRdd().toDebugString()):
        raise _refusal("makes Spark shuffle the messages, as a join with a large table does")


def nodes_of(plan: Any) -> Iterator[Any]:
    """Yield the nodes of a plan of Spark's, from its root."""
    yield plan
    children = plan.children()
    for place in range(children.size()):
        yield from nodes_of(children.apply(place))


def _shuffle(node: Any) -> str | None:
    """Return what a user calls a node that shuffles the stream; ``None`` for any other."""
    name = node.nodeName()
    if not node.isStreaming():
        return None
    if name in _SHUFFLES or (name == "Repartition" and node.shuffle()):
        return "redistributes rows (REPARTITION, DISTRIBUTE BY, CLUSTER BY or REBALANCE)"
    if name == "Sort" and getattr(node, "global")():
        return "sorts rows by ORDER BY"
    return None


def _require_groups(plan: Any, key: Collection[str]) -> None:
    """Refuse a query with state unless each row is a group, and the key tells groups apart."""
    output = plan.output()
    attributes = [output.apply(place) for place in range(output.size())]
    known = {each.exprId().id() for each in attributes if each.name() in key}
    node = plan
    while node.nodeName() not in ("Aggregate", "Distinct"):
        children = [child for child in _children(node) if child.isStreaming()]
        if len(children) != 1:
            raise _refusal("keeps a state of other rows than groups")
        if node.nodeName() == "Project":
            known |= _sources(node.projectList(), known)
        (node,) = children
    if node.nodeName() == "Distinct":
        groups = node.output()
    else:
        known |= _sources(node.aggregateExpressions(), known)
        groups = node.groupingExpressions()
    for place in range(groups.size()):
        group = groups.apply(place)
        references = _ids(group.references())
        if references and not references & known:
            raise ConfigError(
                f"source.key: {', '.join(key)} does not tell the rows of source.sql apart, which keeps them apart by"
                f" {group.sql().replace('`', '')}, too: which of several comes last in a unit is not determined",
                "Add that column to the result and to source.key; or take it out of GROUP BY, or of DISTINCT, and"
                " aggregate it, as by max_by(column, _offset).",
            )


def _children(node: Any) -> Iterator[Any]:
    children = node.children()
    return (children.apply(place) for place in range(children.size()))


def _sources(expressions: Any, wanted: Collection[int]) -> set[int]:
    """Return what the expressions of some ids are made of."""
    found: set[int] = set()
    for place in range(expressions.size()):
        expression = expressions.apply(place)
        if expression.exprId().id() in wanted:
            found |= _ids(expression.references())
    return found


def _ids(attributes: Any) -> set[int]:
    listed = attributes.toSeq()
    return {listed.apply(place).exprId().id() for place in range(listed.size())}


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"source.sql {what}, {_LAST}",
        "Leave that out; broadcast the table of a join by a hint, as in `SELECT /*+ BROADCAST(t) */ …`. A changelog"
        " without source.key, in which no row replaces another, takes such a query.",
    )
