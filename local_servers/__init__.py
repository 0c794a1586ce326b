"""Postgres, MariaDB, Kafka and Airflow as processes of this machine, for the demo, the tests and the benchmarks."""
