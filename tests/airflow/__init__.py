"""The provider in a real Airflow, which all tests of this folder share."""
