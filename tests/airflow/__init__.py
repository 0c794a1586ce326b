"""The provider in a real Airflow, one for all tests of this folder."""
