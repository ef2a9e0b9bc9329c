-- Set reservations of a tenant to what the logs of its requests take, or give them back. See reserve_log.lua.
-- Run by: gateway/log_quota.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] ms until requests that have not finished are looked up again; then for each request its id, the bytes of
--       its finished log (-1: not finished; 0: no such request), and the ms until that expires
-- Returns: bytes held.
-- Retry: harmless, it sets what was read.
local now = now_ms()
although_full()
for i = 2, #ARGV, 3 do
  local id, bytes = ARGV[i], tonumber(ARGV[i + 1])
  local before = tonumber(call('HGET', prefix .. 'bytes', id) or -1)
  if before >= 0 and bytes == 0 then
    unreserve(id)
  elseif before >= 0 and bytes < 0 then
    call('ZADD', prefix .. 'open', 'XX', now + ARGV[1], id)
  elseif before >= 0 then
    call('ZREM', prefix .. 'open', id)
    call('ZADD', prefix .. 'kept', now + ARGV[i + 2], id)
    call('HSET', prefix .. 'bytes', id, bytes)
    call('INCRBY', prefix .. 'held', bytes - before)
    call('PEXPIRE', prefix .. 'kept', math.max(1, call('PTTL', prefix .. 'bytes')))
  end
end
return tonumber(call('GET', prefix .. 'held') or 0)
