"""The definition that a SELECT becomes: joins, anchor, columns, and the SQL that is run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from airflow_cdc_provider.engine.core.errors import ConfigError
from airflow_cdc_provider.engine.core.table import Column, Table
from airflow_cdc_provider.engine.views.definition import View
from airflow_cdc_provider.engine.views.select_parser import Dialect, parse_view
from airflow_cdc_provider.engine.views.settings import ViewSettings


def a_table(label: str, *columns: str, key: tuple[str, ...] = ("id",)) -> Table:
    schema, _, name = label.partition(".")
    described = tuple(Column(column, "integer", 23, None, False, True) for column in columns)
    return Table(1, schema, name, described, key, "d", None, (), "r")


TABLES = {
    table.label: table
    for table in (
        a_table("shop.orders", "id", "customer_id", "total"),
        a_table("shop.customers", "id", "city", "parent_id"),
        a_table("shop.lines", "order_id", "line", "qty", key=("order_id", "line")),
        a_table("shop.events", "order_id", "note", key=()),
        a_table("shop.We ird", "Sel", "id"),
        a_table("old.orders", "id"),
    )
}


def parse(select: str, dialect: Dialect = "postgres") -> View:
    return parse_view(ViewSettings("dwd", "v", select), TABLES, dialect)


def refused(select: str) -> ConfigError:
    with pytest.raises(ConfigError, match=r"^view dwd\.v: ") as caught:
        parse(select)
    return caught.value


def test_the_key_of_the_first_table_is_the_anchor() -> None:
    view = parse(
        "SELECT o.total, o.id AS number, c.city FROM shop.orders o LEFT JOIN shop.customers c ON c.id = o.customer_id"
    )
    assert [(each.column, each.output) for each in view.anchor] == [("id", "number")]
    assert view.one_row
    assert view.columns == {"shop.orders": ("customer_id", "id", "total"), "shop.customers": ("city", "id")}
    assert view.select({"shop.orders": "o1", "shop.customers": "c1"}, ("anchors a", "a.k = o.id")) == (
        'SELECT "o"."total" AS "total", "o"."id" AS "number", "c"."city" AS "city" FROM o1 AS "o"'
        ' JOIN anchors a ON a.k = o.id LEFT JOIN c1 AS "c" ON "c"."id" = "o"."customer_id"'
    )
    assert View.from_dict(view.to_dict()) == view


def test_a_key_of_which_a_part_is_joined_gives_several_rows() -> None:
    view = parse("SELECT o.id, l.qty FROM shop.orders o JOIN shop.lines l ON l.order_id = o.id")
    assert not view.one_row
    assert parse(
        "SELECT o.id, l.qty FROM shop.orders o JOIN shop.lines l ON l.order_id = o.id AND l.line = o.total"
    ).one_row


def test_an_equality_of_other_types_may_find_several_rows() -> None:
    """As floating-point numbers, several large integers are one."""
    orders = TABLES["shop.orders"]
    columns = tuple(
        replace(each, type="float8", type_oid=701) if each.name == "customer_id" else each for each in orders.columns
    )
    view = parse_view(
        ViewSettings(
            "dwd", "v", "SELECT o.id, c.city FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
        ),
        {**TABLES, "shop.orders": replace(orders, columns=columns)},
        "postgres",
    )
    assert not view.one_row


@pytest.mark.parametrize(
    ("select", "refused"),
    [
        ("SELECT c.id, c.city FROM shop.customers c", None),
        ("SELECT c.id, c.city::text AS t FROM shop.customers c WHERE c.city::text > 'a'", None),
        ("SELECT c.id FROM shop.customers c WHERE c.city > 'a'", "compared or computed with"),
        ("SELECT c.city, count(*) AS n FROM shop.customers c GROUP BY c.city", "compared or computed with"),
        ("SELECT c.id FROM shop.customers c JOIN shop.customers d ON d.city = c.city", "compared or computed with"),
    ],
)
def test_operators_of_an_extension_are_refused(select: str, refused: str | None) -> None:
    """The sessions of a sink find only those of pg_catalog: they would compare citext as text."""
    customers = TABLES["shop.customers"]
    columns = tuple(
        replace(each, type="public.citext", type_oid=9, operators=("public.<", "public.=", "public.>="))
        if each.name == "city"
        else each
        for each in customers.columns
    )
    tables = {**TABLES, "shop.customers": replace(customers, columns=columns)}
    if refused is None:
        assert parse_view(ViewSettings("dwd", "v", select), tables, "postgres").one_row
        return
    with pytest.raises(ConfigError, match=refused):
        parse_view(ViewSettings("dwd", "v", select), tables, "postgres")


def test_groups_of_a_later_table_turn_inner_joins_around() -> None:
    view = parse(
        "SELECT city, count(*) AS n FROM shop.lines l JOIN shop.orders o ON o.id = l.order_id"
        " JOIN shop.customers c ON c.id = o.customer_id GROUP BY 1 HAVING n > 1"
    )
    assert view.root.name == "c"
    lines = view.aliases[0]
    assert [alias.name for alias in view.path(lines)] == ["l", "o", "c"]
    assert lines.equalities == (("order_id", "id"),)
    assert view.having == "COUNT(*) > 1"
    assert view.looked_up.keys() == {
        ("shop.customers", ("city",)),
        ("shop.customers", ("id",)),
        ("shop.orders", ("customer_id",)),
        ("shop.orders", ("id",)),
        ("shop.lines", ("order_id",)),
    }


def test_a_right_join_is_a_left_join_from_the_other_side() -> None:
    view = parse("SELECT o.id, c.city FROM shop.customers c RIGHT JOIN shop.orders o ON o.customer_id = c.id")
    assert [(alias.name, alias.join) for alias in view.aliases] == [("o", "first"), ("c", "left")]


def test_a_table_may_be_joined_with_itself() -> None:
    view = parse(
        "SELECT c.id, p.city AS of_parent, g.city AS of_grandparent FROM shop.customers c"
        " LEFT JOIN shop.customers p ON p.id = c.parent_id LEFT JOIN shop.customers g ON g.id = p.parent_id"
    )
    assert [alias.name for alias in view.path(view.aliases[2])] == ["g", "p", "c"]
    assert view.columns == {"shop.customers": ("city", "id", "parent_id")}


def test_of_several_equalities_those_lead_on_that_find_one_row() -> None:
    view = parse(
        "SELECT o.id, l.qty FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
        " JOIN shop.lines l ON l.qty = c.id AND l.order_id = o.id AND l.line = o.total"
    )
    assert view.aliases[2].parent == "o"


def test_names_fold_as_in_the_dialect_of_the_sink() -> None:
    assert parse('SELECT W."Sel", w.ID FROM shop."We ird" w').columns == {"shop.We ird": ("Sel", "id")}
    assert parse("SELECT w.sel, w.ID FROM shop.`We ird` w", "mysql").columns == {"shop.We ird": ("Sel", "id")}
    assert "no such captured column" in refused('SELECT w."sel", w.id FROM shop."We ird" w').message


@pytest.mark.parametrize(
    ("select", "what"),
    [
        ("SELECT o.id FROM shop.orders o; SELECT 1", "one SELECT"),
        ("SELECT o.id FROM shop.orders o UNION SELECT c.id FROM shop.customers c", "set operations"),
        ("SELECT o.id FROM", "cannot be parsed"),
        ("SELECT DISTINCT o.id FROM shop.orders o", "DISTINCT"),
        ("SELECT o.id FROM shop.orders o ORDER BY 1", "ORDER BY"),
        ("SELECT o.id FROM shop.orders o LIMIT 1", "LIMIT"),
        ("WITH x AS (SELECT 1 AS a) SELECT a FROM x", "WITH"),
        ("SELECT * FROM shop.orders o", r"has \*"),
        ("SELECT o.id, o.total + 1 FROM shop.orders o", "has no name"),
        ("SELECT o.id, o.total AS id FROM shop.orders o", "two of its columns are named id"),
        ("SELECT o.id FROM shop.orders o, shop.customers c", "CROSS JOIN"),
        ("SELECT o.id FROM shop.orders o JOIN shop.customers c ON c.id > o.customer_id", "no equality"),
        ("SELECT o.id FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id + 1", "no equality"),
        ("SELECT o.id FROM shop.orders o JOIN shop.customers c ON c.id = o.id OR c.id = o.total", "no equality"),
        ("SELECT o.id FROM shop.orders o FULL JOIN shop.customers c ON c.id = o.id", "FULL JOIN"),
        ("SELECT o.id FROM shop.orders o NATURAL JOIN shop.customers c", "NATURAL"),
        ("SELECT o.id FROM shop.orders o JOIN shop.customers c USING (id)", "USING"),
        (
            "SELECT o.id FROM shop.orders o JOIN shop.customers c ON c.id = o.id"
            " RIGHT JOIN shop.lines l ON l.qty = o.id",
            "RIGHT JOIN after another join",
        ),
        ("SELECT o.id FROM (SELECT 1 AS id) o", "subquery"),
        ("SELECT o.id FROM shop.orders o WHERE EXISTS (SELECT 1 FROM shop.lines)", "EXISTS|subquery"),
        ("SELECT o.id, rank() OVER () AS r FROM shop.orders o", "window function"),
        ("SELECT o.id, random() AS r FROM shop.orders o", r"RANDOM\(\) is not allowed"),
        ("SELECT o.id, now() AS r FROM shop.orders o", "CURRENT_TIMESTAMP is not allowed"),
        ("SELECT o.id FROM shop.orders o WHERE current_date > o.total", "CURRENT_DATE is not allowed"),
        ("SELECT o.id, array_agg(o.total) AS t FROM shop.orders o GROUP BY o.id", "depends on the order"),
        ("SELECT count(*) AS n FROM shop.orders o", "aggregates without GROUP BY"),
        ("SELECT o.total FROM shop.orders o", "does not select o.id"),
        ("SELECT count(*) AS n FROM shop.orders o GROUP BY o.total", "does not select o.total"),
        ("SELECT o.total + 1 AS t, count(*) AS n FROM shop.orders o GROUP BY 1", "something other than columns"),
        (
            "SELECT o.total, c.city FROM shop.orders o JOIN shop.customers c ON c.id = o.id GROUP BY 1, 2",
            "columns of several tables",
        ),
        (
            "SELECT c.city FROM shop.orders o LEFT JOIN shop.customers c ON c.id = o.id GROUP BY c.city",
            "may leave without a row",
        ),
        ("SELECT e.note FROM shop.events e", "has no key"),
        ("SELECT o.id FROM orders o", "captured in several schemas"),
        ("SELECT o.id FROM shop.missing o", "is not captured"),
        ("SELECT o.missing FROM shop.orders o", "column o.missing is unknown"),
        ("SELECT id FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id", "is ambiguous"),
        ("SELECT o.id FROM shop.orders o JOIN shop.customers o ON o.id = o.id", "two tables have the alias o"),
        ("SELECT o.id, o.total FROM shop.orders o GROUP BY ROLLUP (o.id)", "something other than columns"),
        ("SELECT o.id FROM shop.orders o TABLESAMPLE system (1)", "more than a table"),
    ],
)
def test_what_cannot_be_maintained_is_refused_with_what_to_write_instead(select: str, what: str) -> None:
    error = refused(select)
    assert re.search(what, error.message), error.message
    assert error.solution
