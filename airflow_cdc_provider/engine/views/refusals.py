"""The constructs of SQL that a view must not have, each with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from sqlglot import exp

Refuse = Callable[[str, str], NoReturn]

_CLAUSES = {
    "with_": ("WITH", "Join the tables themselves."),
    "distinct": ("DISTINCT", "Use GROUP BY."),
    "limit": ("LIMIT", "Let the readers of the view limit what they read."),
    "offset": ("OFFSET", "Let the readers of the view limit what they read."),
    "order": ("ORDER BY", "Let the readers of the view order what they read."),
    "windows": ("a window", "Compute window functions where the view is read."),
    "qualify": ("QUALIFY", "Compute window functions where the view is read."),
    "locks": ("FOR UPDATE", "Remove it."),
    "into": ("INTO", "Remove it; the view's name is its key in the pipeline file."),
    "laterals": ("LATERAL", "Join the tables themselves."),
    "pivots": ("PIVOT", "Use aggregates with FILTER or CASE."),
    "sort": ("SORT BY", "Remove it."),
    "cluster": ("CLUSTER BY", "Remove it."),
    "distribute": ("DISTRIBUTE BY", "Remove it."),
}
_ALLOWED_CLAUSES = {"expressions", "from_", "joins", "where", "group", "having"}
_CONSTRUCTS: dict[type[exp.Expr], tuple[str, str]] = {
    exp.Window: ("a window function", "Compute window functions where the view is read."),
    exp.Subquery: ("a subquery", "Join the table instead."),
    exp.Select: ("a subquery", "Join the table instead."),
    exp.Exists: ("EXISTS", "Join the table instead, or LEFT JOIN it and test for NULL."),
    exp.Star: ("*", "Name the columns, so that a new column of a table does not change the view."),
    exp.Placeholder: ("a parameter", "Write the value."),
    exp.Parameter: ("a variable", "Write the value."),
    exp.SessionParameter: ("a variable", "Write the value."),
    exp.Unnest: ("a function that returns several rows", "Compute it where the view is read."),
    exp.Explode: ("a function that returns several rows", "Compute it where the view is read."),
}
_NOW = "the current time or a random value"
# Functions whose result depends on more than their arguments. A server that knows is asked in addition.
_VOLATILE = {
    *("now", "clock_timestamp", "statement_timestamp", "transaction_timestamp", "timeofday", "sysdate", "random"),
    *("rand", "uuid", "uuid_short", "gen_random_uuid", "uuidv4", "uuidv7", "uuid_generate_v4", "nextval", "currval"),
    *("lastval", "sleep", "pg_sleep", "last_insert_id", "connection_id", "row_count", "found_rows", "current_setting"),
    *("user", "session_user", "system_user", "current_role", "database", "schema", "version", "benchmark", "get_lock"),
    *("curdate", "curtime", "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"),
    *("utc_date", "utc_time", "utc_timestamp", "unix_timestamp", "current_user", "current_catalog", "current_schema"),
    *("monotonically_increasing_id", "spark_partition_id", "input_file_name", "randn", "shuffle", "random_normal"),
    *("random_bytes", "setval", "txid_current", "pg_current_xact_id", "inet_client_addr", "load_file"),
    *("sys_guid", "encrypt", "rownum", "last_value", "is_free_lock", "is_used_lock", "release_lock"),
    *("release_all_locks", "master_pos_wait", "source_pos_wait", "master_gtid_wait", "ps_current_thread_id"),
}
_ORDERED = (exp.ArrayAgg, exp.GroupConcat, exp.JSONArrayAgg, exp.JSONObjectAgg, exp.ArrayConcatAgg)
_ORDERED_NAMES = {
    "json_agg",
    "jsonb_agg",
    "xmlagg",
    "string_agg",
    "array_agg",
    "group_concat",
    "json_arrayagg",
    "listagg",
}
_UNORDERABLE = {"json_object_agg", "jsonb_object_agg", "json_objectagg", "collect_list", "collect_set", "any_value"}


def refuse_constructs(select: exp.Select, dialect: str, refuse: Refuse) -> None:
    """Refuse what a view must not have.

    :param dialect: the dialect in which errors name what is refused.
    :param refuse: raises an error, from what is wrong and what to write instead.
    """
    for name, value in select.args.items():
        if value and name not in _ALLOWED_CLAUSES:
            what, instead = _CLAUSES.get(name, (name.strip("_").upper(), "Remove it."))
            refuse(f"it has {what}", instead)
    if select.args.get("from_") is None:
        refuse("it has no FROM", "Name the tables that it is computed from.")
    for join in select.args.get("joins") or ():
        _refuse_join(join, refuse)
    for table in select.find_all(exp.Table):
        _refuse_table(table, refuse)
    group = select.args.get("group")
    if group is not None and any(value for name, value in group.args.items() if name != "expressions"):
        refuse("GROUP BY has ROLLUP, CUBE, GROUPING SETS or ALL", "Name columns of one table; write several views.")
    for each in select.walk():
        if each is not select:
            _refuse_expression(each, dialect, refuse)


def _refuse_join(join: exp.Join, refuse: Refuse) -> None:
    if join.method or join.args.get("using"):
        refuse("it has NATURAL JOIN or USING", "Write the equalities with ON.")
    if join.side == "FULL":
        refuse("it has a FULL JOIN", "Write two views, one with LEFT JOIN from each side.")
    if join.kind == "CROSS" or join.args.get("on") is None:
        refuse("it has a CROSS JOIN", "Write JOIN … ON with an equality of two columns.")
    if join.side not in ("", "LEFT", "RIGHT") or join.kind not in ("", "INNER", "OUTER"):
        refuse(f"it has {join.side or join.kind} JOIN", "Use JOIN or LEFT JOIN.")


def _refuse_table(table: exp.Table, refuse: Refuse) -> None:
    more = [name for name, value in table.args.items() if value and name not in ("this", "db", "catalog", "alias")]
    alias = table.args.get("alias")
    if more or (alias is not None and alias.args.get("columns")):
        refuse(f"FROM has more than a table and its alias: {table.sql()}", "Write `schema.table AS alias`.")


def _refuse_expression(each: exp.Expr, dialect: str, refuse: Refuse) -> None:
    if isinstance(each, exp.Star) and isinstance(each.parent, exp.Count):
        return
    for kind, (what, instead) in _CONSTRUCTS.items():
        if isinstance(each, kind):
            refuse(f"it has {what}", instead)
    name, written = _function_name(each), each.sql(dialect)
    if name in _VOLATILE:
        refuse(f"{written} is not allowed, because it depends on {_NOW}", "Compare with it where the view is read.")
    if name in _UNORDERABLE:
        refuse(f"the result of {written} depends on the order of the rows", "Use an aggregate with ORDER BY.")
    ordered = isinstance(each, _ORDERED) or name in _ORDERED_NAMES
    if ordered and each.find(exp.Order) is None and not isinstance(each.parent, exp.WithinGroup):
        refuse(
            f"the result of {written} depends on the order of the rows",
            "Write ORDER BY in it, with columns that distinguish the rows.",
        )


def _function_name(each: exp.Expr) -> str:
    """Return the name of a function call in small letters; empty if it is none."""
    if isinstance(each, exp.Anonymous):
        return str(each.name).lower()
    if isinstance(each, exp.Func):
        return each.sql_name().lower()
    return ""
