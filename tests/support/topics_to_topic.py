"""A pipeline from topics to a topic."""

from __future__ import annotations

import json
import uuid
from typing import Any

from airflow_cdc_provider.engine.kafka.cluster import Cluster
from tests.support.kafka_sink import consumed
from tests.support.topics import TopicsPipeline

SECONDS = "20 seconds"


VISITS = "id STRING, at TIMESTAMP NOT NULL"


# Identifiers are validated, and those of a window are emitted once, when it is closed.
VALID = f"""
SELECT id, window.start AS start, count(*) AS visits FROM messages
WHERE id RLIKE '^[a-z]{{3}}[0-9]+$' GROUP BY id, window(at, '{SECONDS}')
"""


class TopicsToTopic(TopicsPipeline):
    """A pipeline whose sink is a topic of the same broker."""

    def __init__(self, *arguments: Any, **source: Any) -> None:
        super().__init__(*arguments, **source)
        # Unlike the pipeline's name, the topic's name is unique among tests.
        self.out = f"out-{uuid.uuid4().hex[:8]}"
        self.document["sink"] = {
            "type": "kafka",
            "brokers": self.broker.brokers,
            "format": "json",
            "topic": f"{self.out}.{{table}}",
            "partitions": 3,
        }
        self.change()

    def received(self, committed: bool = True) -> list[dict[str, Any]]:
        """Return the messages of the topic, as a consumer reads them."""
        found = consumed(Cluster(self.broker.brokers), f"{self.out}.t", committed)
        return [json.loads(message.value or b"") for message in found]
