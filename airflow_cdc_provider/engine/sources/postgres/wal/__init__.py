"""The log of changes: read from the slot, cut into pieces that end at commits, decoded.

::

    walsender --COPY--> PGconn (libpq) --> wal_messages.fill_buffer --> wal_buffer.Buffer --> wal_piece.Piece
        ^                                                                   |    ^                 |
        |                                                                 full   | release         | as bytes, to a task
        |                   wal_reader.WalReader (a thread)                 |    |                 v
        +------- status: acknowledged LSN <---------------------------------+----+     pgoutput.decode --> Changes
                 (or no reading while the buffer is full)                 committed()  (one per relation, Arrow columns)

The reader looks only at what decides where a batch may end. The task that decodes a piece does the rest:
:mod:`.pgoutput` finds messages and transactions, :mod:`.pgoutput_tuples` the values of their columns, both with the
help of :mod:`.pgoutput_wire`.
"""
