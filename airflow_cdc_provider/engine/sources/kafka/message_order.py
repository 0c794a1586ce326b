"""Checks that a query keeps messages in order, so that the last message of a key is known.

A sink takes the rows of a unit in the order of Spark's tasks. While no shuffle moves rows between tasks, rows from one
partition of a topic stay in the order of its offsets. After a shuffle they arrive in the order of its blocks, so an
older row may become the last one of its key. Groups of an aggregate are the exception: each occurs once in a unit, so
their order does not matter if the key distinguishes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pyspark.sql import DataFrame

from airflow_cdc_provider.engine.core.errors import ConfigError

_SHUFFLES = frozenset({"RepartitionByExpression", "RebalancePartitions"})
_LAST = "so an older message of a key may replace the last one"


def require_order(rows: DataFrame, key: Collection[str], stateful: bool) -> None:
    """Refuse a query that loses the order of its rows although the last row of a key counts.

    Spark chooses the kind of join for each batch, see :func:`require_unshuffled`.

    :param rows: the result of the query, as a stream.
    :param key: columns of the result that identify its rows.
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
    """Refuse a batch whose rows were shuffled: the kind of join may change with the size of the joined tables.

    :param rows: the result of a batch of a query without state.
    :raises ConfigError: when the rows were shuffled.
    """
    if "ShuffledRowRDD" in str(rows._jdf.queryExecution().toRdd().toDebugString()):
        raise _refusal("makes Spark shuffle the messages, as a join with a large table does")


def nodes_of(plan: Any) -> Iterator[Any]:
    """Yield the nodes of a Spark plan, from its root."""
    yield plan
    children = plan.children()
    for place in range(children.size()):
        yield from nodes_of(children.apply(place))


def _shuffle(node: Any) -> str | None:
    """Return the SQL name of a node that shuffles the stream; ``None`` for any other node."""
    name = node.nodeName()
    if not node.isStreaming():
        return None
    if name in _SHUFFLES or (name == "Repartition" and node.shuffle()):
        return "redistributes rows (REPARTITION, DISTRIBUTE BY, CLUSTER BY or REBALANCE)"
    if name == "Sort" and getattr(node, "global")():
        return "sorts rows by ORDER BY"
    return None


def _require_groups(plan: Any, key: Collection[str]) -> None:
    """Refuse a query with state unless each row is a group, and the key distinguishes the groups."""
    output = plan.output()
    attributes = [output.apply(place) for place in range(output.size())]
    known = {each.exprId().id() for each in attributes if each.name() in key}
    node = plan
    while node.nodeName() not in ("Aggregate", "Distinct"):
        children = [child for child in _children(node) if child.isStreaming()]
        if len(children) != 1:
            raise _refusal("keeps state of rows that are not groups")
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
                f"source.key: {', '.join(key)} does not identify the rows of source.sql because it also groups by"
                f" {group.sql().replace('`', '')}: which of several rows comes last in a unit is undetermined",
                "Add that column to the result and to source.key. Or remove it from GROUP BY or DISTINCT, and"
                " aggregate it, for example with max_by(column, _offset).",
            )


def _children(node: Any) -> Iterator[Any]:
    children = node.children()
    return (children.apply(place) for place in range(children.size()))


def _sources(expressions: Any, wanted: Collection[int]) -> set[int]:
    """Return the ids of the columns from which the wanted expressions are computed."""
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
        "Remove it; to join a table, broadcast it with a hint, as in `SELECT /*+ BROADCAST(t) */ …`. A changelog"
        " without source.key accepts such a query, because no row replaces another.",
    )
