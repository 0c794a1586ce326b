"""Any error of the target server, with any SQLSTATE and at any step, is reported with a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from airflow_cdc_provider.engine.core.errors import CdcError, Retry, TargetConflict, ValueRefused
from airflow_cdc_provider.engine.core.record import Mode
from tests.sinks.begun_sink import NEW, TARGET, WHOLE, begin
from tests.support.postgres_store import PostgresStore
from tests.support.refusals import attempts

pytestmark = pytest.mark.slow

# Classes with a special meaning, unknown classes, and one that drivers do not know.
STATES = (
    "P0001",
    "22000",
    "22P02",
    "23502",
    "23514",
    "40001",
    "42P10",
    "0A000",
    "42501",
    "55000",
    "55P03",
    "ZZ123",
    "A1B2C",
)
RECORDS = ("pipelines", "tables", "chunks")


@pytest.fixture
def store(database: str) -> Iterator[PostgresStore]:
    made = PostgresStore(database)
    yield made
    made.query("DROP EVENT TRIGGER IF EXISTS refuse_ddl")
    made.query("DROP SCHEMA IF EXISTS airflow_cdc, copy CASCADE")


def refuse_with(store: PostgresStore, state: str) -> None:
    """Let every change of the target, of the record and of a definition fail with an SQLSTATE."""
    body = f"BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END"
    for kind in ("trigger", "event_trigger"):
        store.query(f"CREATE OR REPLACE FUNCTION public.refuse_{kind}() RETURNS {kind} LANGUAGE plpgsql AS $${body}$$")


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_no_error_of_the_driver_leaves_the_sink(store: PostgresStore, mode: Mode) -> None:
    begun = begin(store, mode)
    trials = attempts(begun)
    refuse_with(store, "P0001")
    for table in ('copy."Ord ers"', *(f"airflow_cdc.{name}" for name in RECORDS)):
        store.query(
            f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION public.refuse_trigger()"
        )
    store.query("CREATE EVENT TRIGGER refuse_ddl ON ddl_command_start EXECUTE FUNCTION public.refuse_event_trigger()")
    record = begun.record
    for state, (step, attempt) in itertools.product(STATES, trials.items()):
        store.query("ALTER EVENT TRIGGER refuse_ddl DISABLE")
        refuse_with(store, state)
        store.query("ALTER EVENT TRIGGER refuse_ddl ENABLE")
        with pytest.raises(CdcError) as refused:
            attempt()
        assert refused.value.solution, (state, step)
        assert "no" in refused.value.message or state in ("42501", "55P03"), (state, step)
        if state in ("P0001", "ZZ123", "A1B2C", "42P10"):
            assert refused.value.retry is Retry.ASK, (state, step, refused.value)
    store.query("ALTER EVENT TRIGGER refuse_ddl DISABLE")
    assert begun.record == record
    assert begun.rows() == []


def test_no_error_of_the_driver_leaves_what_reads(store: PostgresStore) -> None:
    begun = begin(store, "mirror")
    begun.copy(WHOLE, NEW)
    tables = {f"airflow_cdc.{name}": begun.sink.record for name in RECORDS}
    # If the user's condition fails, its command reports this as a problem of the condition.
    reads: dict[str, Callable[[], object]] = {**tables, 'copy."Ord ers"': lambda: list(begun.sink.rows(TARGET))}
    refuse = """CREATE OR REPLACE FUNCTION public.refuse_read(read text) RETURNS bool LANGUAGE plpgsql AS $$
        BEGIN IF read = '{}' THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '{}'; END IF; RETURN true; END $$"""
    store.query(refuse.format("none", "P0001"))
    for number, table in enumerate(reads):
        schema, _, name = table.partition(".")
        store.query(f"ALTER TABLE {table} RENAME TO held{number}")
        view = f"CREATE VIEW {schema}.{name} AS SELECT * FROM {schema}.held{number}"
        store.query(f"{view} WHERE public.refuse_read('{table}')")
    for read in reads.values():
        read()
    for state, (table, read) in itertools.product(STATES, reads.items()):
        store.query(refuse.format(table, state))
        with pytest.raises(CdcError) as refused:
            read()
        assert refused.value.solution, (state, table)
        assert "on purpose" in refused.value.message or state in ("42501", "55P03"), (state, table)


CASES = {
    # Statements at the target, and those that undo them; the error, and the text of its solution.
    "not null": (
        "ALTER {t} ALTER note SET NOT NULL",
        "ALTER {t} ALTER note DROP NOT NULL",
        ValueRefused,
        "DROP NOT NULL",
    ),
    "theirs": (
        "ALTER {t} ADD theirs int NOT NULL DEFAULT 1; ALTER {t} ALTER theirs DROP DEFAULT",
        "ALTER {t} DROP theirs",
        ValueRefused,
        "The source has no such column",
    ),
    "check": (
        "ALTER {t} ADD CONSTRAINT small CHECK (id < 5)",
        "ALTER {t} DROP CONSTRAINT small",
        ValueRefused,
        'DROP CONSTRAINT "small"',
    ),
    "domain": (
        "CREATE DOMAIN copy.few AS bigint CHECK (VALUE < 5); ALTER {t} ALTER id TYPE copy.few",
        "ALTER {t} ALTER id TYPE bigint; DROP DOMAIN copy.few",
        ValueRefused,
        'ALTER DOMAIN "copy"."few" DROP CONSTRAINT "few_check"',
    ),
    "narrow": ("ALTER {t} ALTER note TYPE varchar(2)", "ALTER {t} ALTER note TYPE text", ValueRefused, "longer"),
    "index": (
        'ALTER {t} DROP CONSTRAINT "Ord ers_pkey"',
        "ALTER {t} ADD PRIMARY KEY (id)",
        TargetConflict,
        "airflow-cdc preflight",
    ),
    "generated": (
        "ALTER {t} DROP note, ADD note text GENERATED ALWAYS AS ('x') STORED",
        "ALTER {t} ALTER note DROP EXPRESSION",
        TargetConflict,
        "airflow-cdc preflight",
    ),
    "rule": (
        "CREATE RULE r AS ON UPDATE TO {n} DO INSTEAD NOTHING",
        "DROP RULE r ON {n}",
        TargetConflict,
        "airflow-cdc preflight",
    ),
    "column": (
        "ALTER {t} RENAME note TO noted",
        "ALTER {t} RENAME noted TO note",
        TargetConflict,
        "airflow-cdc preflight",
    ),
}
FIRST = {
    "index": "lost the unique index",
    "generated": "generates a column",
    "rule": "has a rule",
}


def test_each_refusal_has_its_own_cause_and_remedy(store: PostgresStore) -> None:
    begun = begin(store, "mirror")
    begun.copy(WHOLE, ("1", "a", "1.00"))
    name = 'copy."Ord ers"'
    row = ("7", None, "1.00")
    for case, (spoil, mend, error, solution) in CASES.items():
        for statement in spoil.format(t=f"TABLE {name}", n=name).split("; "):
            store.query(statement)
        with pytest.raises(CdcError) as refused:
            begun.unit(100, 200, begun.put("1", "long text", "2.00"), begun.put(*row))
        assert type(refused.value) is error, (case, refused.value)
        assert solution in refused.value.solution, (case, refused.value.solution)
        assert FIRST.get(case, "") in refused.value.message, (case, refused.value)
        for statement in mend.format(t=f"TABLE {name}", n=name).split("; "):
            store.query(statement)
    begun.unit(100, 200, begun.put(*row))
    assert len(begun.rows()) == 2


def test_a_row_without_a_partition_is_told_as_that(store: PostgresStore) -> None:
    store.query("CREATE SCHEMA copy")
    store.query(
        'CREATE TABLE copy."Ord ers" (id bigint PRIMARY KEY, note text, amount numeric(10,2)) PARTITION BY RANGE (id)'
    )
    store.query('CREATE TABLE copy.few PARTITION OF copy."Ord ers" FOR VALUES FROM (0) TO (5)')
    begun = begin(store, "mirror")
    with pytest.raises(ValueRefused) as refused:
        begun.unit(100, 200, begun.put("7", "x", "1.00"))
    assert 'CREATE TABLE … PARTITION OF "copy"."Ord ers" DEFAULT' in refused.value.solution
    with pytest.raises(ValueRefused, match="no partition"):
        begun.copy(WHOLE, ("7", "x", "1.00"))
