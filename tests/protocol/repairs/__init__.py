"""Breaks of the link between slot and record: refused before a change is lost, and repaired as the message says.

Each case breaks something while the pipeline is stopped, writes more rows, and checks that every command refuses with
exit code 3 and leaves the target untouched. Then it runs the command that the message names, and checks that source and
target are equal again, including the rows written while it was broken. A changelog contains no change twice.
"""
