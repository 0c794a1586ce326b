"""The entry point of the installed script ``airflow-cdc``."""

from airflow_cdc_provider.engine.commands.cli import main

__all__ = ["main"]
