"""Operators that run a pipeline's commands as tasks."""
