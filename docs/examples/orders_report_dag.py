"""Runs when the pipeline ``shop`` has changed its copy of ``shop.orders``."""

from airflow.sdk import dag, task

from airflow_cdc_provider import table_asset

ORDERS = table_asset("shop", "shop.orders")


@dag(schedule=[ORDERS], max_active_runs=1)
def orders_report():
    @task(inlets=[ORDERS])
    def report(inlet_events=None):
        # Several events may trigger one run. The last one has the latest position.
        watermark = inlet_events[ORDERS][-1].extra["applied_lsn"]
        print(f"The copy of shop.orders has all that the source had committed before {watermark}.")

    report()


orders_report()
