"""The demos: pipelines that run on real servers in a real Airflow, with a comparison of source and target."""
