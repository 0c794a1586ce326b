"""A run of a part of a pipeline: the commit records of all sinks as one, the epoch, the heartbeat, and restarts."""
