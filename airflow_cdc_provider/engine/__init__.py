"""The engine: everything that knows Postgres, Spark and the sinks.

Nothing in here imports Airflow. It runs on Spark drivers and executors, where
it arrives by ``--py-files``.
"""
