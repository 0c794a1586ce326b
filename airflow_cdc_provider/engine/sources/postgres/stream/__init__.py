"""The stream: pieces of the log become units, which are staged by tasks and committed by the driver."""
