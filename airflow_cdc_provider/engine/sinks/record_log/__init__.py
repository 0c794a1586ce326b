"""Shared code of sinks without transactions: a commit record that is a log of entries."""
