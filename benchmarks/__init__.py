"""Benchmarks of the engine's throughput, each compared with Postgres's own tools on the same machine."""
