"""What the provider adds to Airflow beside operators: the page CDC, as an entry of the menu and as a tab on each Dag.

Every process of Airflow imports this module, and only the API server needs the page's endpoints: they are made when it
asks for them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_cdc_provider import __version__

# Relative addresses are resolved against Airflow's base URL, whatever it is. The version keeps browsers from running
# the scripts of another one.
_STATIC = f"cdc/static/{__version__}"
_APP = {
    "name": "CDC",
    "bundle_url": f"{_STATIC}/main.js",
    "icon": f"{_STATIC}/icon.svg",
    "icon_dark_mode": f"{_STATIC}/icon-dark.svg",
}


class CdcPlugin(AirflowPlugin):
    """Loaded through the entry point ``airflow.plugins``."""

    name = "airflow_cdc"
    react_apps = [
        {**_APP, "destination": "nav", "category": "browse", "url_route": "cdc"},
        {**_APP, "destination": "dag", "url_route": "cdc-pipelines"},
    ]

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The endpoints that the page asks, and its scripts."""
        from airflow_cdc_provider.plugins.api import make_app

        return [{"app": make_app(), "url_prefix": "/cdc", "name": "CDC"}]

    @property
    def timetables(self) -> list[Any]:  # type: ignore[override]
        """The schedules; imported by who asks for them, since every process of Airflow loads the plugin."""
        from airflow_cdc_provider.timetables.backfill import BackfillTimetable

        return [BackfillTimetable]
