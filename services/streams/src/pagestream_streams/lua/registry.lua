-- The living engines of a model. KEYS[1] is the registry itself. Retry: harmless.
-- ARGV: engine id to renew ('': only look), time to live in ms
-- Returns the ids of the living engines.
local now = now_ms()
if ARGV[1] ~= '' then
  call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now) -- first: it needs no memory, which lets the other through when Redis is full
  call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
end
return call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
