"""Scrapes a job's metrics as Prometheus does."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(port: int | None) -> dict[tuple[str, str], float]:
    """Return every sample of a scrape by its name and labels, ordered by name, without the pipeline's label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all("pipeline" in sample.labels and "part" in sample.labels for sample in samples)
    return {
        (
            sample.name.removeprefix("airflow_cdc_"),
            ",".join(value for name, value in sorted(sample.labels.items()) if name != "pipeline"),
        ): sample.value
        for sample in samples
    }
