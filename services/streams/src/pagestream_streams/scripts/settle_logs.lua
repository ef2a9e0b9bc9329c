-- Set reservations of a tenant to what the logs of its requests take, or give them back. See reserve_log.lua.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] ms until requests that have not finished are looked up again, [2] ms until the keys expire; then for each
--       request its id, the bytes of its finished log (-1: not finished; 0: no such request), and the ms until that
--       expires (for no such request: by what it is given back, see reserve_log.lua; 0: in any case)
-- Returns: bytes held.
-- Retry: harmless, it sets what was read.
local now = now_ms()
although_full()
for i = 3, #ARGV, 3 do
  local id, bytes, rest = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local before = tonumber(call('HGET', prefix .. 'bytes', id) or -1)
  if bytes == 0 then
    if before >= 0 and (rest == 0 or tonumber(call('ZSCORE', prefix .. 'open', id) or 0) == rest) then
      unreserve(id)
    end
  elseif bytes < 0 then
    call('ZADD', prefix .. 'open', 'XX', now + ARGV[1], id)
  else
    -- Also one without a reservation: it was renewed when that had expired, or accepted where there was no limit.
    call('ZREM', prefix .. 'open', id)
    call('ZADD', prefix .. 'kept', now + rest, id)
    call('HSET', prefix .. 'bytes', id, bytes)
    call('INCRBY', prefix .. 'held', bytes - math.max(0, before))
    for _, name in ipairs({'bytes', 'open', 'kept', 'held'}) do
      call('PEXPIRE', prefix .. name, ARGV[2])
    end
  end
end
return tonumber(call('GET', prefix .. 'held') or 0)
