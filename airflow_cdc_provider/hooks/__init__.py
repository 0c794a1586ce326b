"""Connections, deployment and submission: how Airflow reaches a pipeline's servers and starts its Spark jobs."""
