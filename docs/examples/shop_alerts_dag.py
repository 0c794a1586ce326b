from datetime import timedelta

from airflow.providers.smtp.notifications.smtp import SmtpNotifier
from airflow.sdk import DAG

from airflow_cdc_provider import cdc_dag
from airflow_cdc_provider.operators.pipeline import CdcVerifyOperator
from airflow_cdc_provider.operators.slot_guard import CdcSlotGuardOperator
from airflow_cdc_provider.sensors.pipeline import CdcLagSensor

PIPELINE = "/opt/airflow/pipelines/shop.yaml"


def mail(subject, text):
    return SmtpNotifier(to="data@example.com", from_email="airflow@example.com", subject=subject, html_content=text)


ERROR = "{{ exception | default('The process of the task has died, see its log.') | e }}"
failed = mail("{{ ti.dag_id }}.{{ ti.task_id }} failed", f"<pre>{ERROR}</pre>")

# The stream, and the steps before it. It runs until a user stops it, which is a success.
dag = cdc_dag(
    PIPELINE,
    until="forever",
    default_args={"retries": 2, "retry_delay": timedelta(seconds=30), "on_failure_callback": failed},
    on_success_callback=mail("The stream of {{ dag.dag_id }} was stopped", "{{ dag_run.run_id }}"),
)

with DAG("shop_lag", schedule="*/10 * * * *", max_active_runs=1, catchup=False):
    CdcLagSensor(task_id="lag", pipeline=PIPELINE, below_seconds=120, timeout=300, on_failure_callback=failed)

with DAG("shop_slots", schedule="@hourly", max_active_runs=1, catchup=False):
    CdcSlotGuardOperator(
        task_id="slots",
        conn_id="shop_pg",
        budget="10GiB",
        on_findings=mail("Slots of the shop", "{% for each in findings %}<p>{{ each.message | e }}</p>{% endfor %}"),
        on_failure_callback=failed,
    )

with DAG("shop_verify", schedule="0 3 * * *", max_active_runs=1, catchup=False):
    CdcVerifyOperator(task_id="verify", pipeline=PIPELINE, on_failure_callback=failed)
