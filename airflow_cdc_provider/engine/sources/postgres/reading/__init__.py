"""Reads of tables by chunks: the snapshot, re-reads, and reads that users request.

::

    snapshot_job (chunks of all tables)       reread_requests, rereads (by users)    stream (schema changes,
        |                                              |                              missing values)
        |  one task a chunk, on executors              |                                   |
        v                                              v                                   v
    chunk_task.write_chunk                         reread.read_again, reread_as_defined, read_keys_again
        |                                              |  read_barriers: older transactions have ended?
        |                                              |
        +-------------> snapshot_read.write_rows <-----+
                             |
                        SnapshotReader: lock, snapshot, rows ---> Sink.write_chunk / Sink.replace
                             |                                        |  takes batches() or copy_data(),
                        read_sessions: ADBC or COPY                   |  then finish()
                             |                                        |
                        marker, high watermark <----------------------+

:mod:`.chunk_sql` divides tables into chunks and composes the queries. :mod:`.row_ranges` composes the conditions with
which backfills request a range of rows.
"""
