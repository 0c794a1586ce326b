"""Shared code of sinks that store files: paths, storage, and a log of entries."""
