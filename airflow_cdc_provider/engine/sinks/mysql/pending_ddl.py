"""Makes DDL on target tables crash-safe, although MySQL commits DDL immediately.

A step of the Postgres sink is one transaction of data, record and DDL. In MySQL, DDL ends the preceding transaction and
its lock on the epoch. So a change of a table is announced first and settled afterwards:

1. The named lock ``airflow_cdc_<pipeline>`` is taken. It belongs to the session, not to a transaction, and lasts until
   the server has ended the session and its running statement. A process that takes the epoch takes this lock first, so
   the epoch does not change meanwhile.
2. A transaction that checks the epoch writes the change to ``airflow_cdc.pending`` and commits.
3. The DDL runs: one statement, which the server applies completely or not at all.
4. A transaction updates the record to match, and removes the entry once nothing else is left to do.

A process that takes the epoch, or locks its row for a commit, first looks for an entry and *settles* it under the lock
of step 1. So nothing is ever applied to a table in between. The state of the table decides, not the memory of a
process:

* An **alteration** writes its token into the table's comment. If the token is there, the record is updated; otherwise
  the entry is removed, because nothing has happened.
* An **exchange** puts a separately filled table in the place of the target, with one RENAME. Readers never see a
  missing table, or a value of one definition under the other. Step 2 records the new rows, and is the point of no
  return: as long as the filled table exists, the exchange is completed.
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
from airflow_cdc_provider.engine.sinks.mysql.session_errors import code_of, is_retryable, server_message
from airflow_cdc_provider.engine.sinks.mysql.table_definition import Mode, columns_of, comment
from airflow_cdc_provider.engine.sinks.mysql.view_record import KIND, finish_awaited, finish_exchange

# After a lock timeout or an ended session, another attempt decides what has happened.
_PASSING = {0, 1205, 1213, 1317, 1053, 1927, 2003, 2006, 2013}
_REFERRED = {1451, 3730}

ChangeKind = Literal["alteration", "exchange"]


def announce(
    session: Session, pipeline: str, target: Target, kind: ChangeKind, token: str, reread: bool = False
) -> None:
    """Write a change to the record, within a transaction.

    :param target: the target with the new definition of its table.
    :param token: identifies the attempt; for a separately filled table, its name.
    :param reread: for an alteration: the rows are about to be read again, and differ from the source until then.
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
    """Run an alteration that has been announced, and settle it.

    :raises CannotFollow: when the target cannot be changed; nothing has happened.
    """
    pymysql = driver()
    marked = [*clauses, f"COMMENT = '{comment(pipeline, token)}'"]
    failpoint("before-alteration")
    try:
        session.run(f"ALTER TABLE {quoted(target.schema, target.name)} {', '.join(marked)}")
    except pymysql.MySQLError as e:
        if code_of(e) in _PASSING:
            raise
        finish_announced(session, pipeline, mode)
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be changed like {target.table.label}:"
            f" {server_message(e)}",
            "Nothing from this change on has been applied. Remove the obstacle at the target (a constraint, an index or"
            " a generated column that uses the column, a missing privilege), then start again.",
        ) from e
    failpoint("after-alteration")
    finish_announced(session, pipeline, mode)


def finish_announced(session: Session, pipeline: str, mode: Mode) -> None:
    """Complete or discard the announced change; called under the named lock, outside of a transaction."""
    found = session.rows(
        "SELECT source_table, kind, token, target_schema, target_table, definition, reread FROM airflow_cdc.pending"
        " WHERE pipeline = %s",
        [pipeline],
    )
    for label, kind, token, schema, name, definition, reread in found:
        if kind == KIND:
            finish_exchange(session, pipeline, int(definition))
            continue
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
        finish_awaited(session, pipeline, token, made)
        if made and reread:
            begin_again(session, pipeline, label)
        session.run("DELETE FROM airflow_cdc.pending WHERE pipeline = %s AND source_table = %s", [pipeline, label])
        session.commit()


def _drop_defaults(session: Session, pipeline: str, mode: Mode, target: Target) -> None:
    """Remove the defaults that filled added columns in earlier rows.

    Deletes and truncates of a changelog got these values too, but must not have any. A missing default was already
    handled.
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
            # MySQL sets no default on a text column, not even NULL; a definition without a default implies NULL.
            session.run(f"ALTER TABLE {table} MODIFY COLUMN {quoted(column.name)} {definitions[column.name]}")


def begin_again(session: Session, pipeline: str, label: str) -> None:
    """Make a table one unread chunk whose rows will replace the existing ones."""
    session.run("DELETE FROM airflow_cdc.chunks WHERE pipeline = %s AND source_table = %s", [pipeline, label])
    session.run(
        "INSERT INTO airflow_cdc.chunks (pipeline, source_table, chunk, definition) VALUES (%s, %s, 0, %s)",
        [pipeline, label, json.dumps(Chunk(label, 0, None, None).to_dict())],
    )


def is_pending(session: Session, pipeline: str) -> bool:
    """Return whether a change has been announced but not settled."""
    return bool(session.rows("SELECT 1 FROM airflow_cdc.pending WHERE pipeline = %s", [pipeline]))


def _gone(aside: str) -> str:
    return f"{aside}_old"


def _exchange(session: Session, target: Target, aside: str) -> None:
    """Put the separately filled table in the place of the target, unless this has been done."""
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
        if is_retryable(e):
            raise
        raise CannotFollow(
            f"the target table {target.schema}.{target.name} cannot be replaced by airflow_cdc.{aside}, into which"
            f" {target.table.label} has been read: {server_message(e)}",
            f"Drop the obstacle (a trigger on {target.schema}.{target.name}, or a foreign key), then start again: the"
            " new table takes its place. Recreate the obstacle afterwards.",
        ) from e
    failpoint("after-exchange")


def _drop_replaced(session: Session, target: Target, gone: str) -> None:
    """Drop a replaced table; a foreign key that is invisible to the pipeline's user may still refer to it."""
    try:
        session.run(f"DROP TABLE IF EXISTS {quoted('airflow_cdc', gone)}")
    except driver().MySQLError as e:
        if code_of(e) not in _REFERRED:
            raise
        raise TargetConflict(
            f"cannot drop the table airflow_cdc.{gone}, which was {target.schema}.{target.name} until"
            f" {target.table.label} was read again, because a foreign key from elsewhere refers to it:"
            f" {server_message(e)}",
            f"Drop this foreign key, then start again. Recreate it afterwards on {target.schema}.{target.name}.",
        ) from e


def _comment_of(session: Session, schema: str, name: str) -> str | None:
    found = session.rows(
        "SELECT table_comment FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
        [schema, name],
    )
    return found[0][0] if found else None
