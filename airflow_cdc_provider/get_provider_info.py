"""The metadata that Airflow reads when it discovers installed providers. This module imports nothing."""

from __future__ import annotations


def get_provider_info() -> dict[str, object]:
    """Describe the provider in the terms of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-cdc-provider",
        "name": "Postgres CDC",
        "description": (
            "Change data capture from `PostgreSQL <https://www.postgresql.org/>`__ on "
            "`Apache Spark <https://spark.apache.org/>`__: parallel snapshots, a stream that applies "
            "each change exactly once, and monitoring of the replication slot.\n"
        ),
        "integrations": [
            {
                "integration-name": "Postgres CDC",
                "external-doc-url": "https://www.postgresql.org/docs/current/logicaldecoding.html",
                "how-to-guide": ["/docs/quickstart.md", "/docs/airflow.md"],
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": [
                    "airflow_cdc_provider.operators.approval",
                    "airflow_cdc_provider.operators.drop",
                    "airflow_cdc_provider.operators.pipeline",
                    "airflow_cdc_provider.operators.prepare",
                    "airflow_cdc_provider.operators.resnapshot",
                    "airflow_cdc_provider.operators.slot_guard",
                    "airflow_cdc_provider.operators.snapshot",
                    "airflow_cdc_provider.operators.stream",
                ],
            }
        ],
        "sensors": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": ["airflow_cdc_provider.sensors.pipeline", "airflow_cdc_provider.sensors.slot"],
            }
        ],
        "triggers": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": [
                    "airflow_cdc_provider.triggers.changes",
                    "airflow_cdc_provider.triggers.job",
                    "airflow_cdc_provider.triggers.request",
                    "airflow_cdc_provider.triggers.slots",
                    "airflow_cdc_provider.triggers.watcher",
                ],
            }
        ],
        "hooks": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": ["airflow_cdc_provider.hooks.postgres_cdc"],
            }
        ],
        "connection-types": [
            {
                "connection-type": "postgres_cdc",
                "hook-class-name": "airflow_cdc_provider.hooks.postgres_cdc.PostgresCdcHook",
                "hook-name": "Postgres CDC",
                "ui-field-behaviour": {
                    "hidden-fields": [],
                    "relabeling": {"schema": "Database", "login": "Role"},
                    "placeholders": {
                        "host": "db.example.com",
                        "port": "5432",
                        "schema": "shop",
                        "login": "cdc, for a source with REPLICATION",
                        "password": "empty if a certificate or .pgpass is used",
                        "extra": '{"connect_timeout": "10", "sslcert": "/etc/ssl/cdc.crt"}',
                    },
                },
                "conn-fields": {
                    "use": {
                        "label": "Used as",
                        "description": "Only for Test: the role of the server in a pipeline",
                        "schema": {
                            "type": "string",
                            "enum": ["source", "target"],
                            "values_display": {
                                "source": "source: changes are captured from it",
                                "target": "target: changes are copied into it",
                            },
                            "default": "source",
                        },
                    },
                    "sslmode": {
                        "label": "SSL mode",
                        "description": "Whether TLS is used and the certificate is checked, as libpq's sslmode",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full", None],
                            "values_display": {"null": "libpq's default, prefer"},
                            "default": None,
                        },
                    },
                    "sslrootcert": {
                        "label": "SSL root certificate",
                        "description": (
                            "File with the certificate of the authority that signed the server's certificate; must be"
                            " on workers, triggerer and Spark's executors; for example /etc/ssl/db-authority.crt"
                        ),
                        "schema": {"type": ["string", "null"], "default": None},
                    },
                    "slot": {
                        "label": "Replication slot to test",
                        "description": (
                            "Only for Test of a source: the slot that a pipeline will use, for example"
                            " airflow_cdc_shop; checks that the pipeline can use it, or that a slot is free"
                        ),
                        "schema": {"type": ["string", "null"], "pattern": "^[a-z0-9_]{0,63}$", "default": None},
                    },
                    "publication": {
                        "label": "Publication to test",
                        "description": (
                            "Only for Test of a source: the publication that a pipeline will use, for example"
                            " airflow_cdc_shop; checks that it publishes all operations, or can be created"
                        ),
                        "schema": {"type": ["string", "null"], "maxLength": 63, "default": None},
                    },
                },
            }
        ],
        "extra-links": [
            "airflow_cdc_provider.links.page.CdcPageLink",
            "airflow_cdc_provider.links.spark.SparkUiLink",
        ],
        "config": {
            "airflow_cdc": {
                "description": "The page CDC in Airflow's user interface, and links to Spark's.",
                "options": {
                    "pipelines": {
                        "description": (
                            "Location of the pipeline files that the page shows: a folder, or a glob of files. "
                            "The API server reads them."
                        ),
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "/opt/airflow/pipelines/*/cdc.yaml",
                        "default": "{AIRFLOW_HOME}/pipelines",
                    },
                    "spark_history_server": {
                        "description": (
                            "Address of Spark's history server, which the links of ended Spark jobs lead to. "
                            "The jobs must write event logs for it."
                        ),
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "https://spark-history.example.com",
                        "default": "",
                    },
                },
            }
        },
    }
