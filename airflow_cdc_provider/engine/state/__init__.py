"""The state location, which jobs write and Airflow reads: heartbeats, history, submissions, requests."""
