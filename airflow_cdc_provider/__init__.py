"""Change data capture from Postgres on Spark, run by Airflow.

Importing this package imports nothing else. The engine is shipped to Spark executors that have no Airflow, and Airflow
discovers providers at a time when importing Airflow itself is not yet safe. The names that Dag files use are imported
on first access.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from airflow_cdc_provider.assets import applied_lsn, table_asset, view_asset
    from airflow_cdc_provider.dag import CdcTaskGroup, cdc_dag
    from airflow_cdc_provider.retry import CDC_RETRY_POLICY

__version__ = "0.1.0"

_HOMES = {
    "CDC_RETRY_POLICY": "retry",
    "CdcTaskGroup": "dag",
    "applied_lsn": "assets",
    "cdc_dag": "dag",
    "table_asset": "assets",
    "view_asset": "assets",
}

__all__ = ["CDC_RETRY_POLICY", "CdcTaskGroup", "applied_lsn", "cdc_dag", "table_asset", "view_asset"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
