"""``python -m benchmarks.peers``: fetch the jars of the peers that are tested, unless they exist."""

import sys

from benchmarks.lab import JDBC
from benchmarks.peers import debezium, flink_join
from benchmarks.peers.counter import JdkMissing
from local_servers.jars import JarsMissing, fetch

try:
    fetch(JDBC)
    debezium.fetch_jars()
    flink_join.fetch_jars()
except (JarsMissing, JdkMissing) as e:
    sys.exit(e.message)
