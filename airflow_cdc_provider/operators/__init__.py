"""Operators: a pipeline's commands as tasks."""
