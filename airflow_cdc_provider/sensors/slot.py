"""Sensors of a replication slot: it moves, it keeps little log, it is well.

A slot that does not move keeps the source's write-ahead log until the disk is
full. What decides is ``restart_lsn``; it follows the acknowledged
``confirmed_flush_lsn`` some ten to thirty seconds later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_cdc_provider.sensors.base import CdcSensor


class SlotProgressSensor(CdcSensor):
    """Waits until a replication slot has moved, so that the source can remove WAL.

    Each of ``moved_since``, ``restart_lsn`` and ``confirmed_flush_lsn`` that is given must hold. When none is,
    the sensor waits until the slot's ``restart_lsn`` differs from what it was at the first look. A slot that is
    missing or lost fails the task at once, without retries.

    :param moved_since: succeed when the slot's ``restart_lsn`` is beyond this LSN, for example
        ``"{{ ti.xcom_pull(task_ids='provision')['restart_lsn'] }}"``. (templated)
    :param restart_lsn: succeed when the slot's ``restart_lsn`` is at or beyond this LSN. (templated)
    :param confirmed_flush_lsn: succeed when the slot's ``confirmed_flush_lsn`` is at or beyond this LSN. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "moved_since", "restart_lsn", "confirmed_flush_lsn")
    kind = "progress"

    def __init__(
        self,
        *,
        moved_since: str | None = None,
        restart_lsn: str | None = None,
        confirmed_flush_lsn: str | None = None,
        **kwargs: Any,
    ) -> None:
        positions = {
            "moved_since": moved_since,
            "restart_lsn": restart_lsn,
            "confirmed_flush_lsn": confirmed_flush_lsn,
        }
        super().__init__(arguments=positions, **kwargs)


class SlotRetainedWalSensor(CdcSensor):
    """Waits until the source keeps less WAL for a replication slot than a budget.

    :param below: the budget, in bytes or as text such as ``10GiB``; with ``pipeline`` it may be left to the file's
        ``stream.max_retained_wal``. (templated)
    """

    template_fields: Sequence[str] = (*CdcSensor.template_fields, "below")
    kind = "retained"

    def __init__(self, *, below: int | str | None = None, **kwargs: Any) -> None:
        super().__init__(arguments={"below": below}, **kwargs)
        if below is None and self.pipeline is None:
            raise ValueError("give below, or pipeline, whose file has a budget")


class SlotHealthySensor(CdcSensor):
    """Waits until the source keeps all WAL that a slot needs and is not about to remove it (``wal_status``)."""

    kind = "healthy"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(arguments={}, **kwargs)
