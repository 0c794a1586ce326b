from pathlib import Path

from airflow_cdc_provider import cdc_dag

for file in sorted(Path("/opt/airflow/pipelines").glob("*.yaml")):
    cdc_dag(file, schedule="*/15 * * * *", pool="cdc")
