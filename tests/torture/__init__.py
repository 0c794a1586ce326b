"""The torture tests: random tables and writers, a real pipeline, a nemesis, and the checks of the invariants.

Run them with ``python -m tests.torture SECONDS SEED``, or ``make torture``. The seed determines everything random; each
component and each writer has its own generator. So a failing seed replays: the same tables, the same transactions in
the same order within a writer, the same steps of the nemesis. Only the interleaving depends on the machine.
"""
