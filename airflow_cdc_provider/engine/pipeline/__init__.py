"""The pipeline file, and which kinds of sources and sinks there are."""
