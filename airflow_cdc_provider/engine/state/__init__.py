"""What jobs write into the state location and Airflow reads: heartbeats, history, submissions, requests."""
