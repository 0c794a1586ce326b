"""Row changes and their effects on a target: filter by MVCC snapshots, collapse by key, count, judge schema changes."""
