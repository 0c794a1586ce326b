"""Triggers for deferred tasks, which share their polls."""
