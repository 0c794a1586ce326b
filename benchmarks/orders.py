"""Orders, customers and products, a SELECT of one row an order over them, and units of changes."""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = 1_000_000
UNITS = 10
"""Number of units of a backlog."""

SELECT = (
    "SELECT o.id, o.status, o.qty * o.price AS amount, c.name, c.city, p.title FROM public.orders o"
    " JOIN public.customers c ON c.id = o.customer_id LEFT JOIN public.products p ON p.id = o.product_id"
)
COLUMNS = "id, customer_id, customer, product_id, product, status, amount, name, city, title"
KEYED = (
    "SELECT o.id, o.customer_id, c.id AS customer, o.product_id, p.id AS product, o.status, o.qty * o.price AS amount,"
    " c.name, c.city, p.title FROM public.orders o"
    " JOIN public.customers c ON c.id = o.customer_id LEFT JOIN public.products p ON p.id = o.product_id"
)
"""The same with all keys and joined columns, as pg_ivm demands, and the names of its columns."""

TABLES = (
    "CREATE TABLE public.customers (id bigint PRIMARY KEY, name text, city text)",
    "CREATE TABLE public.products (id bigint PRIMARY KEY, title text)",
    "CREATE TABLE public.orders (id bigint PRIMARY KEY, customer_id bigint, product_id bigint, qty bigint,"
    " price numeric, status text)",
)

_UPDATED, _RENAMED, _RETITLED = 58_000, 200, 20
"""Orders, customers and products that a unit changes."""
_PER_CUSTOMER, _PER_PRODUCT = 20, 50


@dataclass(frozen=True)
class Unit:
    """The numbers of rows that a unit changes."""

    orders: int
    customers: int
    products: int

    @classmethod
    def of(cls, orders: int) -> Unit:
        """Return the share of these orders that a unit changes of a million."""
        return cls(*(max(1, n * orders // ORDERS) for n in (_UPDATED, _RENAMED, _RETITLED)))

    @property
    def changes(self) -> int:
        """Return the number of all changes of a unit."""
        return self.orders + self.customers + self.products

    def statements(self, number: int, total: int) -> list[str]:
        """Return the statements of a unit, whose orders are spread over the table."""
        step, first = total // self.orders, number % max(1, total // self.orders)
        return [
            f"UPDATE public.orders SET qty = qty + 1, status = 'changed {number}' WHERE id % {step} = {first}"
            f" AND id <= {step * self.orders}",
            f"UPDATE public.customers SET city = 'moved {number}' WHERE id % 7 = {number % 7}"
            f" AND id <= {7 * self.customers}",
            f"UPDATE public.products SET title = 'title {number}' WHERE id % 7 = {number % 7}"
            f" AND id <= {7 * self.products}",
        ]


def customers_of(orders: int) -> int:
    """Return the number of customers that have these orders."""
    return max(orders // _PER_CUSTOMER, 1)


def products_of(orders: int) -> int:
    """Return the number of products that are ordered."""
    return max(orders // _PER_PRODUCT, 1)


def fill(orders: int) -> list[str]:
    """Return the statements that fill the tables."""
    customers, products = customers_of(orders), products_of(orders)
    return [
        "INSERT INTO public.customers SELECT n, 'name ' || n, 'city ' || n % 100"
        f" FROM generate_series(1, {customers}) n",
        f"INSERT INTO public.products SELECT n, 'title ' || n FROM generate_series(1, {products}) n",
        f"INSERT INTO public.orders SELECT n, 1 + hashint8(n)::bigint & 2147483647 % {customers},"
        f" 1 + n % {products}, n % 5, 9.99, 'new' FROM generate_series(1, {orders}) n",
        f"UPDATE public.orders SET customer_id = 1 + (hashint8(id)::bigint & 2147483647) % {customers}",
        "VACUUM FULL ANALYZE public.orders",
        "ANALYZE",
    ]
