"""The pipeline file, and the registered kinds of sources and sinks."""
