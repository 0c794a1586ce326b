"""Prepares rows for staging."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_cdc_provider.engine.core.effect import ERASED, FRESH, Effect
from airflow_cdc_provider.engine.sinks.postgres.packed_rows import pack

_MANY = 1000  # below this number, an additional statement costs more than it saves


def rows_to_stage(effect: Effect) -> pa.Table:
    """Return the rows of an effect as they are staged.

    :returns: the rows, without ``erased`` if no row is erased; with ``fresh`` (bool) if many rows can be inserted
        without a lookup; packed if they have too many columns, see :mod:`.packed_rows`.
    """
    rows = effect.rows
    if ERASED in rows.column_names and not pc.any(rows[ERASED]).as_py():
        rows = rows.drop_columns(ERASED)
    if effect.fresh is not None and np.count_nonzero(effect.fresh) >= _MANY:
        rows = rows.append_column(FRESH, pa.array(effect.fresh))
    return pack(rows)
