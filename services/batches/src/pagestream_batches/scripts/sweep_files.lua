-- Remove a tenant's files and batches that have expired, at most 100 at once; also when Redis is full.
-- Run by: files.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- Returns: bytes held.
-- Retry: harmless.
although_full()
return sweep_files(now_ms())
