-- Remove the lease of a living engine that ends. If it still owns requests, its lease has to run out instead.
-- Run by: engine/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id
-- Returns: 1.
-- Retry: harmless, there is no lease any more.
although_full()
call('HDEL', prefix .. 'alone', ARGV[1])
if call('EXISTS', prefix .. 'owned:' .. ARGV[1]) == 0 then
  drop_lease(ARGV[1], now_ms())
end
return 1
