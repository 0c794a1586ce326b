"""The stream: pieces of the log become units, which are staged by tasks and committed by the driver.

::

    reader, next to the driver           tasks                              driver
    --------------------------           -----                              ------
    wal.WalReader                                                           stream_job.StreamJob: query, heartbeats
        |  pieces                                                               |
    spark_source.SlotStreamReader                                               |  foreachBatch
        |  partitions()                                                         v
        +------------------------------> spark_source.read()                sink_fanout.SinkFanout: each sink
        |                                     |                                 |
        |  large pieces                  staging_task.StagingTask           unit_writer.UnitWriter: each batch
        v                                     |  decode, filter, collapse       |      |
    PieceStore.deposit() -- fetch() --------->|  (changes.effects)              |  schema_following.SchemaFollower
                                              v                                 |
                                         Sink.stage() --- message ------------> |
        ^                                                                       v
        +---- latestOffset(start): acknowledge <---- Spark's commit log <-- Sink.commit()

Two optimizations run across it, each in its own module: :mod:`.inline_staging` does the staging in the task that reads,
:mod:`.pipelined_commit` applies the first pieces of a unit while others are staged.
"""
