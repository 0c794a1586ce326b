"""What the demo, the tests and the benchmarks run against: real servers, real data, a real Airflow.

Nothing in the provider imports this package. It needs the ``demo`` extra and
nothing else: no containers, no root, no server that is already there.
"""
