"""What Airflow learns about this provider when it looks for installed ones. Imports nothing."""

from __future__ import annotations


def get_provider_info() -> dict[str, object]:
    """Describe the provider in the terms of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-cdc-provider",
        "name": "Postgres CDC",
        "description": (
            "Change data capture from `PostgreSQL <https://www.postgresql.org/>`__ on "
            "`Apache Spark <https://spark.apache.org/>`__: parallel snapshots, a stream that applies "
            "each change exactly once, and care of the replication slot.\n"
        ),
        "integrations": [
            {
                "integration-name": "Postgres CDC",
                "external-doc-url": "https://www.postgresql.org/docs/current/logicaldecoding.html",
                "tags": ["software"],
            }
        ],
        "operators": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": ["airflow_cdc_provider.operators.cdc"],
            }
        ],
        "sensors": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": ["airflow_cdc_provider.sensors.slot"],
            }
        ],
        "hooks": [
            {
                "integration-name": "Postgres CDC",
                "python-modules": ["airflow_cdc_provider.hooks.cdc"],
            }
        ],
        "connection-types": [
            {
                "connection-type": "postgres_cdc",
                "hook-class-name": "airflow_cdc_provider.hooks.cdc.PostgresCdcHook",
                "hook-name": "Postgres CDC",
                "ui-field-behaviour": {
                    "hidden-fields": [],
                    "relabeling": {"schema": "Database", "login": "Role"},
                    "placeholders": {
                        "host": "db.example.com",
                        "port": "5432",
                        "schema": "shop",
                        "login": "cdc, a role with REPLICATION",
                        "extra": '{"sslrootcert": "/etc/ssl/db.crt"}',
                    },
                },
                "conn-fields": {
                    "sslmode": {
                        "label": "SSL mode",
                        "description": "How TLS is used and the server's certificate checked, as libpq's sslmode",
                        "schema": {
                            "type": ["string", "null"],
                            "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full", None],
                            "default": None,
                        },
                    }
                },
            }
        ],
    }
