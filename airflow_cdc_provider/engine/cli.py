"""The command line ``airflow-cdc``, where installed scripts look for it."""

from airflow_cdc_provider.engine.commands.cli import main

__all__ = ["main"]
