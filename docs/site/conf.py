"""The site that `make docs` builds from the Markdown pages of this folder and from the docstrings of the package."""

from typing import Any

from sphinx.application import Sphinx

project = "airflow-cdc-provider"
author = "The airflow-cdc-provider authors"
html_title = project
html_theme = "furo"
extensions = ["myst_parser", "sphinx_copybutton", "sphinxcontrib.mermaid", "sphinx.ext.autodoc", "autoapi.extension"]
exclude_patterns = ["examples", "site"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4  # with the anchors that GitHub gives

# The source is parsed, not imported, so that the site needs none of the package's dependencies.
autoapi_dirs = ["../airflow_cdc_provider"]
autoapi_generate_api_docs = False  # docs/api.rst chooses what is public
autoapi_add_toctree_entry = False
autoapi_ignore = [
    f"*/{private}/*"
    for private in (
        *("plugins", "engine/commands", "engine/kafka", "engine/postgres", "engine/runs", "engine/spark"),
        *("engine/sinks/*", "engine/sources/*", "engine/state", "engine/views"),
    )
]
# Names from modules that are ignored; and annotations such as `type`, which attributes are named like, too.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]


def setup(app: Sphinx) -> None:
    """Leave out of a module what it imports."""
    app.connect("autodoc-skip-member", skips_member)


def skips_member(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool:
    """Return whether the API does not show a member of a module or class."""
    return skip or member.imported
