"""What breaks the link between slot and record: refused before a change is lost, and healed as the message says.

Each case breaks something while the pipeline stands still, writes on, and finds every command refused with exit code 3,
with the target untouched. Then the command that the message names is carried out, and source and target are equal
again, including what was written while it was broken; a changelog tells no change twice.
"""
