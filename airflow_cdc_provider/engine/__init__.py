"""The engine: all code that deals with Postgres, Spark and the sinks.

No module of the engine imports Airflow. The engine runs on Spark drivers and executors, which receive it by
``--py-files``.
"""
