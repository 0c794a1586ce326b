"""Random tables, and the audit trail of the changes that each transaction made in them.

Rows are numbered: the key of a row is a function of its number ``n``, which is also a column, so that statements can
choose rows without knowing the key's type. A trigger gives every version of a row a number, under the row's lock;
another trigger records the changes, in the same transaction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LANES = 4
"""Writers; the rows that writer ``i`` inserts, deletes and moves are those with ``n % LANES = i``."""
SPACE = 600
"""Upper bound of the numbers of rows; twice as high while rows are moved away."""
TOTAL_ACCOUNTS = 40
OPENING_BALANCE = 1000

_WIDE = "(SELECT string_agg(md5({n}::text || '/' || i || '/' || {salt}), '') FROM generate_series(1, {length}) i)"


@dataclass(frozen=True)
class Key:
    """A kind of key.

    :param columns: names and types.
    :param values: the values for the row number ``{n}``, as SQL.
    """

    columns: tuple[tuple[str, str], ...]
    values: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)

    def of(self, n: str) -> str:
        """Return the key's values, comma-separated, for an SQL expression of the row's number."""
        return ", ".join(value.format(n=n) for value in self.values)

    def text(self, prefix: str = "") -> str:
        """Return SQL for the key as one text."""
        return " || '/' || ".join(f"{prefix}{name}::text" for name in self.names)

    def text_in(self, document: str) -> str:
        """Return SQL for the key as one text, from a column that has a row as JSON."""
        return " || '/' || ".join(f"({document} ->> '{name}')" for name in self.names)


KEYS = {
    "bigint": Key((("id", "bigint"),), ("({n}) * 3 - 500",)),
    "text": Key((("code", "text"),), ("(ARRAY['a','B','é','Z','ß','𐍈'])[1 + ({n}) % 6] || 10000 + ({n})",)),
    "uuid": Key((("ident", "uuid"),), ("md5(({n})::text)::uuid",)),
    "composite": Key((("region", "int"), ("label", "varchar(20)")), ("({n}) / 50", "'p' || ({n}) % 50")),
    "moment": Key((("at", "timestamptz"),), ("'2024-02-28 23:00+00'::timestamptz + ({n}) * interval '1 minute'",)),
    "numeric": Key((("amount", "numeric(12,2)"),), ("({n}) / 4.0",)),
}

FILLERS = {
    "body": ("text", "'row ' || ({n}) || ' ' || {salt}"),
    "doc": ("jsonb", "jsonb_build_object('n', ({n}), 'quote', '\"\\', 'salt', {salt})"),
    "flags": ("int[]", "CASE WHEN ({n}) % 3 = 0 THEN NULL ELSE ARRAY[({n}), NULL, {salt}] END"),
    "ratio": ("float8", "({n}) / 3.0::float8"),
    "bin": ("bytea", "decode(md5({salt}::text), 'hex')"),
    "day": ("date", "'1999-12-31'::date + ({n})"),
}


@dataclass(frozen=True)
class Table:
    """A table under torture.

    :param name: in schema ``public``.
    :param kind: ``plain``, ``partitioned`` or ``account``.
    :param identity: ``DEFAULT`` or ``FULL`` with a primary key; ``INDEX``, a unique index instead of one; ``NONE``, no
        key at all, although the columns that make its rows unique exist.
    :param fillers: names of :data:`FILLERS`.
    :param wide: whether it has a column that is stored out of line.
    """

    name: str
    key: Key
    kind: str = "plain"
    identity: str = "DEFAULT"
    fillers: tuple[str, ...] = ()
    wide: bool = False

    @property
    def label(self) -> str:
        return f"public.{self.name}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns of an INSERT; a trigger sets the version."""
        special = ("balance",) if self.kind == "account" else ("wide",) if self.wide else ()
        return (*self.key.names, "n", *self.fillers, *special)

    def values(self, n: str, salt: int, wide_length: int = 0) -> str:
        """Return SQL for the values of :attr:`columns`."""
        fillers = [FILLERS[name][1].format(n=n, salt=salt) for name in self.fillers]
        special = [str(OPENING_BALANCE)] if self.kind == "account" else [wide(n, salt, wide_length)] * self.wide
        return ", ".join([self.key.of(n), n, *fillers, *special])

    def rekey(self, n: str) -> str:
        """Return assignments that give a row another number, and therefore another key."""
        pairs = zip(self.key.names, self.key.values, strict=True)
        return ", ".join([f"n = {n}", *(f"{name} = {value.format(n=n)}" for name, value in pairs)])

    def digest(self, row: str) -> str:
        """Return SQL for a number that represents the values of a row, without columns that are added and dropped."""
        values = ", ".join(f"{row}.{name}" for name in (*self.columns, "version"))
        return f"('x' || left(md5(ROW({values})::text), 15))::bit(60)::bigint"

    def create(self) -> list[str]:
        """Return the statements that create the table, its triggers, and its first rows."""
        required = "" if self.identity == "NONE" else " NOT NULL"
        fields = [f"{name} {kind}{required}" for name, kind in self.key.columns]
        fields += ["n int NOT NULL", *(f"{name} {FILLERS[name][0]}" for name in self.fillers)]
        fields += ["balance bigint NOT NULL"] if self.kind == "account" else ["wide text"] * self.wide
        unique = "UNIQUE" if self.identity in ("INDEX", "NONE") else "PRIMARY KEY"
        constraint = f"CONSTRAINT {self.name}_key {unique} ({', '.join(self.key.names)})"
        fields += ["version bigint NOT NULL", constraint]
        statements = [f"CREATE TABLE {self.label} ({', '.join(fields)})"]
        if self.kind == "partitioned":
            statements[0] += f" PARTITION BY HASH ({self.key.names[0]})"
            for i in range(3):
                part = f"{self.label}_{i}"
                statements.append(
                    f"CREATE TABLE {part} PARTITION OF {self.label} FOR VALUES WITH (MODULUS 3, REMAINDER {i})"
                )
        if self.identity != "DEFAULT":
            identity = f"USING INDEX {self.name}_key" if self.identity == "INDEX" else "FULL"
            statements.append(f"ALTER TABLE {self.label} REPLICA IDENTITY {identity}")
        if self.wide:
            statements.append(f"ALTER TABLE {self.label} ALTER wide SET STORAGE EXTERNAL")
        audit = f"""
CREATE FUNCTION torture.audit_{self.name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO torture.audit (xid, source_table, op, old_key, new_key, old_n, new_n, version, digest) VALUES
        (pg_current_xact_id(), '{self.label}', CASE WHEN TG_OP = 'TRUNCATE' THEN 't' ELSE lower(left(TG_OP, 1)) END,
         {self.key.text("OLD.")}, {self.key.text("NEW.")}, OLD.n, NEW.n, NEW.version, {self.digest("NEW")});
    RETURN NULL;
END $$"""
        statements += [
            audit,
            f"CREATE TRIGGER version BEFORE INSERT OR UPDATE ON {self.label}"
            " FOR EACH ROW EXECUTE FUNCTION torture.version()",
            f"CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {self.label}"
            f" FOR EACH ROW EXECUTE FUNCTION torture.audit_{self.name}()",
            f"CREATE TRIGGER audit_truncate AFTER TRUNCATE ON {self.label}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION torture.audit_{self.name}()",
        ]
        count = TOTAL_ACCOUNTS if self.kind == "account" else SPACE
        chosen = "true" if self.kind == "account" else "n % 3 <> 0"
        statements.append(
            f"INSERT INTO {self.label} ({', '.join(self.columns)})"
            f" SELECT {self.values('n', 0, 100)} FROM generate_series(0, {count - 1}) n WHERE {chosen}"
        )
        return statements


def wide(n: str, salt: int, length: int) -> str:
    """Return SQL for a text of 32 times ``length`` characters, NULL for 0."""
    return _WIDE.format(n=n, salt=salt, length=length) if length else "NULL::text"


SETUP = (
    "CREATE SCHEMA torture",
    "CREATE SEQUENCE torture.version",
    """
CREATE TABLE torture.audit (
    seq bigserial PRIMARY KEY, xid xid8 NOT NULL, source_table text NOT NULL, op text NOT NULL,
    old_key text, new_key text, old_n int, new_n int, version bigint, digest bigint
)""",
    """
CREATE FUNCTION torture.version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.version := nextval('torture.version');
    RETURN NEW;
END $$""",
    # The publication of the audit trail shows which transaction committed when.
    "CREATE PUBLICATION torture_truth FOR TABLE torture.audit",
    "SELECT pg_create_logical_replication_slot('torture_truth', 'pgoutput', failover => true)",
)


def tables(seed: int) -> list[Table]:
    """Return the tables of a seed: two of accounts, one partitioned, one with full identity, one keyless, others."""
    chance = random.Random(f"{seed}/schema")
    kinds = [("plain", "DEFAULT"), ("partitioned", "DEFAULT"), ("plain", "FULL"), ("plain", "NONE")]
    kinds += [("plain", "INDEX")] * chance.randint(0, 1)
    made = [Table(f"account_{name}", KEYS["bigint"], "account") for name in "ab"]
    for i, (kind, identity) in enumerate(kinds):
        fillers = tuple(sorted(chance.sample(sorted(FILLERS), chance.randint(1, 3))))
        key = KEYS[chance.choice(sorted(KEYS))]
        made.append(Table(f"t{i}", key, kind, identity, fillers, wide=i == 0 or chance.random() < 0.6))
    return made
