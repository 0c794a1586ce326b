"""The protocol of stores with transactions, once for all of them: what a sink adds is SQL."""
