"""The stored form: ids, keys, records, log entries, digests and partitions."""
