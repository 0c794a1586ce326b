"""Postgres, MariaDB, Kafka and Airflow as local processes, for the demo, the tests and the benchmarks."""
