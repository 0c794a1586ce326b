"""Sinks: the contract, and a package for each kind."""
