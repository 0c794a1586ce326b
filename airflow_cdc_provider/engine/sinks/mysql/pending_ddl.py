"""Changes of target tables by DDL, which MySQL commits by itself and at once, made safe under a crash at any point.

A step of the Postgres sink is one transaction of data, record and DDL. Here DDL ends the transaction before it, and
its lock on the epoch with it. So a change of a table is announced first and settled afterwards:

1. The lock ``airflow_cdc_<pipeline>`` is taken by name. It belongs to the session, not to a transaction, and lasts
   until the server has ended the session and whatever statement it was in. Who takes the epoch takes that lock first,
   so the epoch stays what it is meanwhile.
2. A transaction that checks the epoch enters the change into ``airflow_cdc.pending`` and commits.
3. The DDL is done: one statement, which the server makes whole or not at all.
4. A transaction brings the record up to it and removes the entry, once nothing else is left to do.

Whoever takes the epoch, or locks its row to commit anything, looks for an entry first and *settles* it under the lock
of step 1, so that nothing is ever applied to a table in between. What the table shows decides, not what anybody
remembers:

* An **alteration** puts a token of its own into the table's comment. If it is there, the record is brought up to it,
  else the entry is removed, and nothing has happened.
* An **exchange** puts a table that was filled aside in the place of the target, by one RENAME, so that no reader meets
  a hole, or a value of the one definition under the other. The record of the new rows is written in step 2, which is
  the point of no return: while the filled table is still aside, the exchange is completed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from airflow_cdc_provider.engine.core.chunk import Chunk
from airflow_cdc_provider.engine.core.errors import CannotFollow, TargetConflict
from airflow_cdc_provider.engine.core.failpoint import failpoint
from airflow_cdc_provider.engine.core.record import Target
from airflow_cdc_provider.engine.core.table import Table
from airflow_cdc_provider.engine.sinks.mysql.address import driver
from airflow_cdc_provider.engine.sinks.mysql.session import Session, quoted
from airflow_cdc_provider.engine.sinks.mysql.session_errors import code_of, may_pass, said
from airflow_cdc_provider.engine.sinks.mysql.table_definition import Mode, columns_of, comment

# That a statement waited too long, or its session ended, is for another try to tell.
_PASSING = {0, 1205, 1213, 1317, 1053, 1927, 2003, 2006, 2013}
_REFERRED = {1451, 3730}

Kind = Literal["alteration", "exchange"]


def announce(session: Session, pipeline: str, target: Target, kind: Kind, token: str, reread: bool = False) -> None:
    """Enter a change into the record, within a transaction.

    :param target: with the definition that its table will have.
    :param token: what tells it from every other attempt; of a table aside, its name.
    :param reread: of an alteration: the rows are about to be read again, and are until then not those of the source.
    """
    session.run(
        "INSERT INTO airflow_cdc.pending (pipeline, source_table, kind, token, target_schema, target_table, definition,"
        " reread) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
        [
            pipeline,
            target.table.label,
            kind,
            token,
            target.schema,
            target.name,
            json.dumps(target.table.to_dict()),
            reread,
        ],
    )


def alter(session: Session, pipeline: str, mode: Mode, target: Target, clauses: Sequence[str], token: str) -> None:
    """Do an alteration that has been announced, and settle it.

    :raises CannotFollow: when the target does not let it be changed; nothing has happened.
    """
    pymysql = driver()
    marked = [*clauses, f"COMMENT = '{comment(pipeline, token)}'"]
    failpoint("before-alteration")
    try:
        session.run(f"ALTER TABLE {quoted(target.schema, target.name)} {', '.join(marked)}")
    except pymysql.MySQLError as e:
        if code_of(e) in _PASSING:
            raise
        settle(session, pipeline, mode)
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be changed as {target.table.label} was: {said(e)}",
            "Nothing from this change on has been applied. Remove what stands in the way at the target (a constraint,"
            " an index or a generated column that uses the column, a missing privilege), then start again.",
        ) from e
    failpoint("after-alteration")
    settle(session, pipeline, mode)


def settle(session: Session, pipeline: str, mode: Mode) -> None:
    """Complete, or forget, what has been announced; under the lock by name, outside of a transaction."""
    found = session.rows(
        "SELECT source_table, kind, token, target_schema, target_table, definition, reread FROM airflow_cdc.pending"
        " WHERE pipeline = %s",
        [pipeline],
    )
    for label, kind, token, schema, name, definition, reread in found:
        target = Target(Table.from_dict(json.loads(definition)), schema, name)
        if kind == "exchange":
            _exchange(session, target, token)
            made = True
        else:
            made = _comment_of(session, schema, name) == comment(pipeline, token)
            if made:
                _drop_defaults(session, pipeline, mode, target)
        if kind == "exchange":
            _drop_replaced(session, target, _gone(token))
        session.begin()
        if made:
            session.run(
                "UPDATE airflow_cdc.tables SET definition = %s, shape = %s WHERE pipeline = %s AND source_table = %s",
                [definition, definition, pipeline, label],
            )
        if made and reread:
            begin_again(session, pipeline, label)
        session.run("DELETE FROM airflow_cdc.pending WHERE pipeline = %s AND source_table = %s", [pipeline, label])
        session.commit()


def _drop_defaults(session: Session, pipeline: str, mode: Mode, target: Target) -> None:
    """Take back the defaults by which rows from before got the values of added columns.

    Deletes and truncates of a changelog got them too, but carry no values. A default that is gone had its turn.
    """
    shapes = session.rows(
        "SELECT shape FROM airflow_cdc.tables WHERE pipeline = %s AND source_table = %s", [pipeline, target.table.label]
    )
    if not shapes:  # the table is about to join, and none of its rows stay
        return
    known = {column.attnum for column in Table.from_dict(json.loads(shapes[0][0])).columns}
    with_default = session.rows(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s"
        " AND column_default IS NOT NULL AND column_default <> 'NULL'",
        [target.schema, target.name],
    )
    names = {str(name) for (name,) in with_default}
    table = quoted(target.schema, target.name)
    definitions = columns_of(target.table, mode, session.collation)
    for column in target.table.columns:
        if column.attnum not in known and column.missing is not None and column.name in names:
            if mode == "changelog":
                session.run(f"UPDATE {table} SET {quoted(column.name)} = NULL WHERE _op IN ('d', 't')")
            failpoint("before-default-dropped")
            # MySQL sets no default of a text, not even NULL; a definition without one has it.
            session.run(f"ALTER TABLE {table} MODIFY COLUMN {quoted(column.name)} {definitions[column.name]}")


def begin_again(session: Session, pipeline: str, label: str) -> None:
    """Make a table one chunk that has not been read, whose rows will replace what is there."""
    session.run("DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s", [pipeline, label])
    session.run(
        "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition) VALUES (%s, %s, 0, %s)",
        [pipeline, label, json.dumps(Chunk(label, 0, None, None).to_dict())],
    )


def is_pending(session: Session, pipeline: str) -> bool:
    """Whether a change has been announced and not settled."""
    return bool(session.rows("SELECT 1 FROM airflow_cdc.pending WHERE pipeline = %s", [pipeline]))


def _gone(aside: str) -> str:
    return f"{aside}_old"


def _exchange(session: Session, target: Target, aside: str) -> None:
    """Put the table that is aside in the place of the target, unless that has been done."""
    if not session.exists("airflow_cdc", aside):
        return
    place, gone = quoted(target.schema, target.name), quoted("airflow_cdc", _gone(aside))
    moves = [f"{quoted('airflow_cdc', aside)} TO {place}"]
    if session.exists(target.schema, target.name):
        moves.insert(0, f"{place} TO {gone}")
    failpoint("before-exchange")
    session.require_database(target.schema)
    try:
        session.run(f"RENAME TABLE {', '.join(moves)}")
    except driver().MySQLError as e:
        if may_pass(e):
            raise
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot make room for the one into which"
            f" {target.table.label} has been read, airflow_cdc.{aside}: {said(e)}",
            f"Drop what stands in the way (a trigger on {target.schema}.{target.name}, a foreign key), then start"
            " again: the new table takes its place. Make it anew afterwards.",
        ) from e
    failpoint("after-exchange")


def _drop_replaced(session: Session, target: Target, gone: str) -> None:
    """Drop a table whose place has been taken; a foreign key that nobody has shown us goes with its table there."""
    try:
        session.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', gone)}")
    except driver().MySQLError as e:
        if code_of(e) not in _REFERRED:
            raise
        raise TargetConflict(
            f"the table airflow_cdc.{gone}, which was {target.schema}.{target.name} until {target.table.label} was read"
            f" again, cannot be dropped, as a foreign key from elsewhere refers to it: {said(e)}",
            f"Drop this foreign key, then start again. It may be made anew, to {target.schema}.{target.name}.",
        ) from e


def _comment_of(session: Session, schema: str, name: str) -> str | None:
    found = session.rows(
        "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
        [schema, name],
    )
    return found[0][0] if found else None
