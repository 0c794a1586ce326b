"""Reads of tables by chunks: the snapshot, re-reads, and reads that users request."""
