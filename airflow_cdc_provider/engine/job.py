"""The script that ``spark-submit`` runs: the command line inside a submitted Spark application."""

import sys

from airflow_cdc_provider.engine.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
