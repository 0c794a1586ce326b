"""The demos: pipelines at work on real servers in a real Airflow, and what they made compared."""
