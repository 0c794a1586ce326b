#!/bin/sh
# Starts Python without Spark's zip of PySpark on its path. spark/python_interpreter.py passes the names of both.
set -f
IFS=:
kept=
for entry in $PYTHONPATH; do
    [ "$entry" -ef "$AIRFLOW_CDC_SPARK_ZIP" ] || kept=$kept${kept:+:}$entry
done
export PYTHONPATH="$kept"
exec "${AIRFLOW_CDC_PYTHON:?is not set}" "$@"
