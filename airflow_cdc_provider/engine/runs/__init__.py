"""A run of a part of a pipeline: commit records of all sinks as one, the epoch, the heartbeat, restarts."""
