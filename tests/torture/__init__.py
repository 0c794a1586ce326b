"""The torture checker: random tables and writers, a real pipeline, a nemesis, and the checks of what must hold.

``python -m tests.torture SECONDS SEED``, or ``make torture``. All that is random comes from the seed, each component
and each writer with a generator of its own, so that a failing seed replays: the same tables, the same transactions in
the same order within a writer, the same steps of the nemesis. Only how they interleave is up to the machine.
"""
