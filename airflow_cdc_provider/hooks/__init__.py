"""Connections, deployment and submission: Airflow's access to a pipeline's servers and Spark jobs."""
