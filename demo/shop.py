"""The demo's source: a shop whose tables contain the hard cases of change data capture.

There are four tables with four kinds of keys (bigint, uuid, composite, text). They contain values whose text form is
difficult (numeric, timestamptz, jsonb, arrays, quotes, NULLs) and bodies that Postgres stores out of line (TOAST), so
that updates do not send them. :func:`load` fills the tables on the server. :class:`Writers` changes them, as customers
would, during the snapshot and the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import psycopg

TABLES = ("customers", "orders", "order_lines", "events")


TABLE_NAMES = tuple(f"shop.{table}" for table in TABLES)


# Rows at scale 1: one million in total.
CUSTOMERS, ORDERS, LINES_PER_ORDER, EVENTS = 100_000, 250_000, 2, 150_000


# One in so many events has a body that is stored out of line.
TOASTED_EVERY = 50


SCHEMA = """
CREATE SCHEMA IF NOT EXISTS shop;
CREATE TABLE IF NOT EXISTS shop.customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    email text,
    balance numeric NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL,
    profile jsonb,
    tags text[]
);
CREATE TABLE IF NOT EXISTS shop.orders (
    id uuid PRIMARY KEY,
    order_no bigint NOT NULL,
    customer_id bigint NOT NULL,
    total numeric(12, 2) NOT NULL,
    created_at timestamptz NOT NULL,
    status text NOT NULL,
    details jsonb
);
CREATE TABLE IF NOT EXISTS shop.order_lines (
    order_no bigint,
    line_no int,
    price numeric NOT NULL,
    article text NOT NULL,
    discounts int[],
    PRIMARY KEY (order_no, line_no)
);
CREATE TABLE IF NOT EXISTS shop.events (
    id text PRIMARY KEY,
    payload jsonb NOT NULL,
    at timestamptz NOT NULL,
    body text
);
"""


# Values depend on the row's number, so every load yields the same rows.
LOADS = (
    """
    INSERT INTO shop.customers
    SELECT n, CASE n % 4 WHEN 0 THEN 'Zoë ' WHEN 1 THEN 'O''Brien ' WHEN 2 THEN 'Łukasz "L" ' ELSE '\\N ' END || n,
        CASE WHEN n % 10 > 0 THEN 'customer' || n || '@example.com' END,
        (n * 7919 % 1000003)::numeric / 100, timestamptz '2024-01-01 00:00+00' + n * interval '61.5 seconds',
        CASE WHEN n % 7 > 0 THEN jsonb_build_object('city', 'City ' || n % 500, 'newsletter', n % 2 = 0) END,
        CASE n % 3 WHEN 0 THEN '{{}}' WHEN 1 THEN ARRAY['a,b', NULL, 'tag ' || n % 20] END
    FROM generate_series(1, {customers}::bigint) AS n
    """,
    """
    INSERT INTO shop.orders
    SELECT md5('order' || n)::uuid, n, 1 + n * 31 % {customers}, (n * 104729 % 100000000)::numeric / 100,
        timestamptz '2025-01-01 00:00+00' + n * interval '37.123456 seconds',
        (ARRAY['new', 'paid', 'sent', 'done'])[1 + n % 4],
        CASE WHEN n % 5 > 0 THEN jsonb_build_object('channel', n % 3, 'coupon', NULL) END
    FROM generate_series(1, {orders}::bigint) AS n
    """,
    """
    INSERT INTO shop.order_lines
    SELECT n, line, (n * 1299709 % 1000003)::numeric / 1000 + line, 'article ' || n * line % 5000,
        CASE WHEN n % 6 = 0 THEN ARRAY[5, NULL, (n % 50)::int] WHEN n % 6 = 1 THEN '{{}}' END
    FROM generate_series(1, {orders}::bigint) AS n, generate_series(1, {lines_per_order}) AS line
    """,
    """
    INSERT INTO shop.events
    SELECT 'event-' || lpad(n::text, 9, '0'), jsonb_build_object('kind', n % 12, 'article', n % 5000),
        timestamptz '2026-01-01 00:00+00' + n * interval '11 seconds',
        CASE WHEN n % {toasted_every} = 0
            THEN (SELECT string_agg(md5(n || '.' || i), '') FROM generate_series(1, 260 + n % 40) AS i)
            WHEN n % 9 > 0 THEN 'seen ' || md5(n::text) END
    FROM generate_series(1, {events}::bigint) AS n
    """,
)


def create_schema(connection: psycopg.Connection[Any]) -> None:
    """Create the shop's tables if they do not exist, and commit."""
    connection.execute(SCHEMA)
    connection.commit()


def load(dsn: str, scale: float = 1.0) -> int:
    """Fill the empty tables, two at a time on the server, and return the number of rows."""
    sizes = {
        "customers": max(1, round(CUSTOMERS * scale)),
        "orders": max(1, round(ORDERS * scale)),
        "lines_per_order": LINES_PER_ORDER,
        "events": max(1, round(EVENTS * scale)),
        "toasted_every": TOASTED_EVERY,
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        # Longest first, so that both connections end at about the same time.
        loads = pool.map(lambda statement: _execute(dsn, statement.format(**sizes)), reversed(LOADS))
        rows = sum(loads)
    _execute(dsn, "ANALYZE " + ", ".join(TABLE_NAMES))
    return rows


def _execute(dsn: str, statement: str) -> int:
    with psycopg.connect(dsn, autocommit=True, client_encoding="UTF8") as connection:
        return connection.execute(statement).rowcount


BIG_BODY = "(SELECT string_agg(md5(%(seed)s || i::text), '') FROM generate_series(1, 270) AS i)"


SOME_EVENT = "(SELECT id FROM shop.events WHERE id >= %(event)s ORDER BY id LIMIT 1)"


STATEMENTS: Mapping[str, str] = {
    "insert order": """
        INSERT INTO shop.orders VALUES (md5('order' || %(new)s::text)::uuid, %(new)s, %(customer)s, %(amount)s,
            clock_timestamp(), 'new', %(document)s)""",
    "insert line": """
        INSERT INTO shop.order_lines VALUES (%(new)s, %(line)s, %(amount)s, 'article ' || %(number)s::text,
            ARRAY[%(line)s::int, NULL])""",
    "charge": "UPDATE shop.customers SET balance = balance - %(amount)s WHERE id = %(customer)s",
    "edit profile": """
        UPDATE shop.customers SET profile = profile || %(document)s, tags = tags || %(text)s::text
        WHERE id = %(customer)s""",
    "advance order": """
        UPDATE shop.orders SET status = CASE status WHEN 'new' THEN 'paid' WHEN 'paid' THEN 'sent' ELSE 'done' END,
            total = total + 0.01 WHERE id = md5('order' || %(order)s::text)::uuid""",
    "insert event": """
        INSERT INTO shop.events VALUES ('event-' || lpad(%(number)s::text, 9, '0') || %(suffix)s, %(document)s,
            clock_timestamp(), %(text)s)""",
    "insert big event": f"""
        INSERT INTO shop.events VALUES ('event-' || lpad(%(number)s::text, 9, '0') || %(suffix)s, %(document)s,
            clock_timestamp(), {BIG_BODY})""",
    "touch event": f"UPDATE shop.events SET payload = payload || %(document)s WHERE id = {SOME_EVENT}",
    "rewrite event": f"UPDATE shop.events SET body = {BIG_BODY} WHERE id = {SOME_EVENT}",
    "rename event": f"UPDATE shop.events SET id = split_part(id, '~', 1) || %(suffix)s WHERE id = {SOME_EVENT}",
    "rename customer": "UPDATE shop.customers SET id = %(new)s WHERE id = %(customer)s",
    "renumber lines": "UPDATE shop.order_lines SET line_no = line_no + 100 WHERE order_no = %(order)s",
    "move lines": "UPDATE shop.order_lines SET order_no = %(new)s WHERE order_no = %(order)s",
    "delete order": "DELETE FROM shop.orders WHERE id = md5('order' || %(order)s::text)::uuid",
    "delete lines": "DELETE FROM shop.order_lines WHERE order_no = %(order)s",
    "delete event": f"DELETE FROM shop.events WHERE id = {SOME_EVENT}",
    "delete customer": "DELETE FROM shop.customers WHERE id = %(customer)s",
    "return customer": """
        INSERT INTO shop.customers VALUES (%(customer)s, %(text)s, NULL, %(amount)s, clock_timestamp(), %(document)s,
            '{}')""",
    "move customer": "UPDATE shop.customers SET city = 'City ' || %(number)s %% 500 WHERE id = %(customer)s",
    "rename product": "UPDATE shop.products SET title = 'Product ' || %(new)s WHERE article = 'article ' || %(number)s",
    "savepoint": "SAVEPOINT doubt",
    "roll back": "ROLLBACK TO SAVEPOINT doubt",
}


# What customers and staff do, as the statements of one transaction, each with its frequency in percent.
Transactions: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]
TRANSACTIONS: Transactions = (
    (14, ("insert order", "insert line", "charge")),
    (12, ("insert order", "insert line", "next line", "insert line", "charge", "edit profile")),
    (12, ("edit profile",)),
    (14, ("advance order",)),
    (8, ("insert event",)),
    (3, ("insert big event", "touch event")),
    (12, ("touch event",)),
    (2, ("rewrite event", "touch event")),
    (5, ("rename event",)),
    (2, ("touch event", "rename event", "next event", "rename event")),
    (2, ("rename customer",)),
    (3, ("renumber lines",)),
    (2, ("move lines", "advance order")),
    (3, ("delete order", "delete lines")),
    (2, ("delete event",)),
    (1, ("delete customer", "return customer")),
    (2, ("insert order", "savepoint", "insert line", "charge", "roll back", "insert line")),
    (1, ("advance order", "savepoint", "rename event", "roll back", "edit profile")),
)


# The wide table also needs products, and the city of a customer in a column.
PRODUCTS_AND_CITIES = """
CREATE TABLE shop.products (article text PRIMARY KEY, title text NOT NULL);
INSERT INTO shop.products SELECT 'article ' || n, 'Product ' || n FROM generate_series(0, 4999) AS n;
ALTER TABLE shop.customers ADD COLUMN city text;
UPDATE shop.customers SET city = profile ->> 'city';
ANALYZE shop.products, shop.customers;
"""


WIDE_TRANSACTIONS: Transactions = (*TRANSACTIONS, (6, ("move customer",)), (4, ("rename product",)))
