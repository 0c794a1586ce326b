"""Runs when the view ``dwd.order_lines_wide`` of the pipeline ``shop`` has moved."""

from airflow.sdk import dag, task

from airflow_cdc_provider import view_asset

LINES = view_asset("shop", "dwd.order_lines_wide")


@dag(schedule=[LINES], max_active_runs=1)
def city_report():
    @task(inlets=[LINES])
    def report(inlet_events=None):
        watermark = inlet_events[LINES][-1].extra["applied_lsn"]
        print(f"The view has all that the source had committed before {watermark}.")

    report()


city_report()
