"""The plugin of the provider: adds the page CDC to Airflow, as a menu entry and as a tab on each Dag.

Every process of Airflow imports this module, but only the API server needs the page's endpoints. Therefore they are
created only on request.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_cdc_provider import __version__

# Relative addresses are resolved against Airflow's base URL. The version in the path keeps browsers from running cached
# scripts of another version.
_STATIC = f"cdc/static/{__version__}"
_APP = {
    "name": "CDC",
    "bundle_url": f"{_STATIC}/main.js",
    "icon": f"{_STATIC}/icon.svg",
    "icon_dark_mode": f"{_STATIC}/icon-dark.svg",
}


class CdcPlugin(AirflowPlugin):
    """The plugin that Airflow loads through the entry point ``airflow.plugins``."""

    name = "airflow_cdc"
    react_apps = [
        {**_APP, "destination": "nav", "category": "browse", "url_route": "cdc"},
        {**_APP, "destination": "dag", "url_route": "cdc-pipelines"},
    ]

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the application with the page's endpoints and scripts."""
        from airflow_cdc_provider.plugins.api import make_app

        return [{"app": make_app(), "url_prefix": "/cdc", "name": "CDC"}]

    @property
    def timetables(self) -> list[Any]:  # type: ignore[override]
        """Return the timetables; imported on request, because every process of Airflow loads the plugin."""
        from airflow_cdc_provider.timetables.backfill import BackfillTimetable

        return [BackfillTimetable]
