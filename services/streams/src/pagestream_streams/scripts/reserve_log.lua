-- Reserve the bytes that a request's log may take of those that its tenant's logs may take together.
--
-- Reservations are in four keys: the hash bytes (request id -> bytes), their sum held, and two sorted sets with each id
-- in one of them: open (scored by when to look the request up, since it may have ended) and kept (of finished requests,
-- scored by when their logs expire). All expire when the tenant sends nothing for long.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] bytes, [3] bytes that all may take (0: any), [4] ms until it is looked up
--       [5] ms until the keys expire, [6] most ids to look up
-- Returns: {1, bytes held, by what it is given back} reserved: its place in open, while no other try shares it; else 0;
--          {0, bytes held, ms until something may be free (-1: nothing is held), ids to look up...} where it doesn't
--          fit: until the next log expires, or the next reservation is looked up.
-- Retry: harmless, a request has one reservation. It counts as shared then, and is found by looking it up.
local id, bytes, limit, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
local AT_ONCE = 1000 -- expired reservations that are removed

if call('HEXISTS', prefix .. 'bytes', id) == 1 then
  -- Of two tries one may be accepted where the other one is refused: with another place the first can't give it back.
  local place = call('ZSCORE', prefix .. 'open', id)
  if place then
    call('ZADD', prefix .. 'open', math.max(place + 1, now + ARGV[4]), id)
  end
  return {1, tonumber(call('GET', prefix .. 'held') or 0), 0}
end
for _, expired in ipairs(call('ZRANGEBYSCORE', prefix .. 'kept', '-inf', now, 'LIMIT', 0, AT_ONCE)) do
  unreserve(expired)
end
local held = tonumber(call('GET', prefix .. 'held') or 0)
if limit > 0 and held + bytes > limit then
  local free
  for _, name in ipairs({'kept', 'open'}) do
    local first = call('ZRANGE', prefix .. name, 0, 0, 'WITHSCORES')[2]
    free = first and math.min(free or math.huge, math.max(0, first - now)) or free
  end
  local out = {0, held, free or -1}
  for _, due in ipairs(call('ZRANGEBYSCORE', prefix .. 'open', '-inf', now, 'LIMIT', 0, ARGV[6])) do
    out[#out + 1] = due
  end
  return out
end
call('HSET', prefix .. 'bytes', id, bytes)
call('ZADD', prefix .. 'open', now + ARGV[4], id)
call('INCRBY', prefix .. 'held', bytes)
for _, name in ipairs({'bytes', 'open', 'kept', 'held'}) do
  call('PEXPIRE', prefix .. name, ARGV[5])
end
return {1, held + bytes, now + ARGV[4]}
