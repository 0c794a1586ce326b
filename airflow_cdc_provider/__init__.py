"""Change data capture from Postgres on Spark, run by Airflow.

Importing this package imports nothing else: the engine is shipped to Spark
executors that have no Airflow, and Airflow discovers providers at a moment
when importing Airflow itself is not yet safe.
"""

__version__ = "0.1.0"
