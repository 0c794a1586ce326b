"""Classifies errors of the driver, with their remedies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow_cdc_provider.engine.core.errors import LimitExceeded
from airflow_cdc_provider.engine.sinks.mysql.address import driver

LOGIN_REFUSED = {1045, 1130, 1698, 1862, 3118, 4151}
LOCKED = {1205, 1213, 3572, 4031}
DENIED = {1044, 1142, 1143, 1227, 1370}
LOST = {0, 1053, 1040, 1203, 1226, 1317, 1927, 2002, 2003, 2006, 2013, 2014, 2055}
READ_ONLY = {1290, 1792, 1836, 3100}
NOTHING = "Nothing of the unit was applied."
_DEFERRED = "Rows are applied table by table, many transactions at once:"
CONFLICTS = {
    **dict.fromkeys((1062, 1169), f"{_DEFERRED} drop the additional unique index, then start again."),
    **dict.fromkeys((1451, 1452, 1216, 1217), f"{_DEFERRED} drop the foreign key, then start again."),
    **dict.fromkeys((1442, 1644), "Correct or drop the trigger that refuses them, then start again."),
    **dict.fromkeys((3819, 4025), "Drop the check (`ALTER TABLE … DROP CONSTRAINT …`), then start again."),
    **dict.fromkeys(
        (1906, 3105), "Make the generated column a plain one (`ALTER TABLE … MODIFY …`), then start again."
    ),
    **dict.fromkeys((1288, 1347, 1471), "Drop or rename the view, so that a table is created, then start again."),
    1526: "Create a partition for the row (`ALTER TABLE … ADD PARTITION …`), then start again.",
}
"""By number: refusals because of changes that others have made to a target table, with remedies."""


VALUES = {
    **dict.fromkeys(
        (1264, 1265, 1292, 1300, 1366, 1406, 1411, 1690, 1911, 3140, 4078),
        f"{NOTHING} Give the column the type with which `airflow-cdc` creates it, then start again.",
    ),
    1048: f"{NOTHING} Make the column nullable (`ALTER TABLE … MODIFY … NULL`), then start again.",
    1364: f"{NOTHING} The source has no such column: give it a default or make it nullable, then start again.",
}
"""By number: refusals of values, with remedies."""


_ROW_TOO_LARGE = 1118


def server_message(error: BaseException) -> str:
    """Return the server's message."""
    return " ".join(str(error.args[-1] if error.args else error).split()) or type(error).__name__


def code_of(error: BaseException) -> int:
    """Return the server's error number; 0 if the connection is closed."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


@contextmanager
def row_of(label: str) -> Iterator[None]:
    """Name the source table in the error for a row that is too large for a page of InnoDB.

    :raises LimitExceeded: when the server reports that.
    """
    try:
        yield
    except driver().MySQLError as e:
        if code_of(e) != _ROW_TOO_LARGE:
            raise
        raise LimitExceeded(
            f"a row of {label} is larger than InnoDB allows: {server_message(e)}",
            "Nothing of the unit was applied, and a retry does not help. A row has up to 41 bytes of every text in a"
            " page of 16 kB, and may use half of the page. Leave columns out with `columns` in the pipeline file, then"
            " run `airflow-cdc resnapshot --all`.",
        ) from e


def is_retryable(error: BaseException) -> bool:
    """Return whether the same statement may succeed later, or with another privilege."""
    return code_of(error) in LOCKED | LOST | READ_ONLY | DENIED
