"""The protocol of sinks with transactions, shared by all of them; a sink adds SQL."""
