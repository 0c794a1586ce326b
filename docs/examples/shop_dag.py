from airflow_cdc_provider import cdc_dag

dag = cdc_dag("/opt/airflow/pipelines/shop.yaml")
