"""Damaged tables, whose differences a comparison should find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from airflow_cdc_provider.engine.comparison import compare as comparison
from airflow_cdc_provider.engine.comparison.compare import TableResult
from airflow_cdc_provider.engine.comparison.side import Sides
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table_rule import TableRule
from airflow_cdc_provider.engine.postgres.connection import Connection, rows
from airflow_cdc_provider.engine.sinks.postgres.compared import mirror_sides
from airflow_cdc_provider.engine.sources.postgres.catalog.captured_tables import resolve

TYPES_DDL = """
CREATE TABLE public.t (
    id int, code char(5), small smallint, big bigint, price numeric, real real, double double precision,
    body text COLLATE "C", posix text COLLATE "POSIX", short varchar(20), raw bytea, doc jsonb, doc_text json,
    tags text[], matrix int[], at timestamptz, local timestamp, day date, span interval, flag bool, letter "char",
    address inet, net cidr, uid uuid, period tstzrange, bits bit(3), name name, money money,
    PRIMARY KEY (code, id)
)
"""


TYPES_ROWS = """
INSERT INTO public.t VALUES
    (1, 'a', 1, 9223372036854775807, 1.0, 'NaN', 0.1, 'plain', 'x', 'v', '\\x00ff', '{"a": [1, null]}', '{"a" : 1}',
     '{a,NULL,"","NULL","b c"}', '{{1,2},{3,NULL}}', 'infinity', '-infinity', '0044-03-15 BC', '1 mon -2 days',
     true, 'c', '10.0.0.1/8', '10.0.0.0/8', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '[2024-01-01,)', B'101', 'n', 1.5),
    (2, 'a', NULL, NULL, 1.00, 'Infinity', '-0', E'quote " '' and \\\\ and \\n, (tab\\t)', 'ä€𝄞', '', '', 'null',
     'null', '{}', '{}', '-infinity', 'infinity', 'infinity', '-00:00:01', false, '', '::1', '::/0',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 'empty', B'000', '', -1),
    (2, 'ab', -1, 0, 1e-20, 1e-30, 1e300, '', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    (3, ' b', 0, 0, 'NaN', 0, 0, NULL, '', 'NULL', '\\x', '"ä"', '"ä"', '{NULL}', '{NULL}',
     '2024-03-31 02:30:00.123456+02', '2024-03-31', '2024-02-29', '1 year', true, 'x', '10.0.0.1', '10.1.0.0/16',
     'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a13', '(,)', B'111', 'z', 0)
"""


def compare(
    source: Connection,
    sink: Connection,
    targets: Sequence[Target],
    live: comparison.Live | None,
    report: comparison.ReportTableProgress = lambda table, done, total: None,
    sides: Callable[[Connection, Connection, Target], Sides] = mirror_sides,
) -> list[TableResult]:
    """Compare with targets that are read through a connection of the test."""
    return comparison.compare(
        source, targets, lambda source, target: nullcontext(sides(source, sink, target)), live, report
    )


@dataclass
class Session:
    """Connections to a test's databases; ``both`` executes a statement on each."""

    source: Connection
    target: Connection

    def both(self, *statements: str) -> None:
        for statement in statements:
            rows(self.source, statement)
            rows(self.target, statement)

    def pair(self, pattern: str = "public.t", target: str | None = None, where: str | None = None) -> Target:
        (table,) = resolve(self.source, (TableRule(pattern, where=where),))
        return Target(table, table.schema, target or table.name)

    def compare(self, pair: Target | None = None, live: comparison.Live | None = None) -> TableResult:
        (result,) = compare(self.source, self.target, [pair or self.pair()], live)
        return result


def found(result: TableResult) -> set[tuple[str, ...]]:
    """Return each difference as its kind and the values of its key."""
    return {(difference.kind, *difference.key.values()) for difference in result.differences}


DAMAGES: dict[str, set[tuple[str, ...]]] = {
    "UPDATE t SET price = 1.00 WHERE id = 1": {("different", "a    ", "1")},
    "UPDATE t SET body = NULL WHERE body = ''": {("different", "ab   ", "2")},
    "UPDATE t SET body = '' WHERE body IS NULL": {("different", " b   ", "3")},
    "UPDATE t SET short = NULL WHERE short = 'NULL'": {("different", " b   ", "3")},
    'UPDATE t SET tags = \'{a,NULL,NULL,"NULL","b c"}\' WHERE id = 1': {("different", "a    ", "1")},
    "UPDATE t SET doc_text = '{\"a\":1}' WHERE id = 1": {("different", "a    ", "1")},
    "UPDATE t SET double = 0.10000000000000002 WHERE id = 1": {("different", "a    ", "1")},
    "UPDATE t SET address = '10.0.0.1/32' WHERE id = 1": {("different", "a    ", "1")},
    "UPDATE t SET at = 'infinity' WHERE id = 2 AND code = 'a'": {("different", "a    ", "2")},
    "UPDATE t SET raw = '\\x00fe' WHERE id = 1": {("different", "a    ", "1")},
    "DELETE FROM t WHERE id = 3": {("missing", " b   ", "3")},
    "INSERT INTO t (id, code) VALUES (9, 'new')": {("extra", "new  ", "9")},
    "UPDATE t SET id = 7 WHERE id = 3": {("missing", " b   ", "3"), ("extra", " b   ", "7")},
    "UPDATE t SET body = o.body FROM t o WHERE t.code = 'a' AND o.code = 'a' AND o.id = 3 - t.id": {
        ("different", "a    ", "1"),
        ("different", "a    ", "2"),
    },
    "TRUNCATE t": {
        ("missing", "a    ", "1"),
        ("missing", "a    ", "2"),
        ("missing", "ab   ", "2"),
        ("missing", " b   ", "3"),
    },
}
