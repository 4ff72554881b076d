"""Files and batch jobs that survive a crash: rows in SQLite, contents on disk."""
