"""Timetables for backfills."""
