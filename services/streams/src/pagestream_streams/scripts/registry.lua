-- Renew an engine in its model's registry, and read the living engines.
-- Run by: engine/session.py, admin/directory.py, admin/sweeper.py.
-- KEYS: the registry; only to read, also a partition's leases, which have the same form.
-- ARGV: [1] engine id to renew ('': only read), [2] lease in ms
-- Returns: the ids of the living engines.
-- Retry: harmless, the lease is renewed again.
local now = now_ms()
if ARGV[1] ~= '' then
  -- First, because it needs no memory: then the next write is admitted when Redis is full.
  call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
end
return call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
