"""Sensors that wait for a pipeline or a slot."""
