"""What the engine's throughput is, each figure beside the one that Postgres's own tools reach on the same machine."""
