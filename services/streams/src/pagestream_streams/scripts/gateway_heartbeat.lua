-- Renew a gateway's lease in this partition.
-- Run by: gateway/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua); prefixes of other
--       partitions may follow the arguments.
-- ARGV: [1] gateway id, [2] lease in ms
-- Returns: for each partition {number of requests of which it is registered as a reader here, requests queued here}.
-- Retry: harmless, the lease is renewed again.
local known = call('HMGET', prefix .. 'meta', 'classes', 'prints')
local queued = call('XLEN', prefix .. 'queue:resume')
queued = queued + call('ZCARD', prefix .. 'suspects') + call('ZCARD', prefix .. 'verdicts')
for class in string.gmatch(known[1] or '', '%d+') do
  queued = queued + call('XLEN', prefix .. 'queue:' .. class)
end
for print in string.gmatch(known[2] or '', '%S+') do
  queued = queued + call('XLEN', prefix .. 'queue:resume:' .. print)
end
although_full()
call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])
return {call('SCARD', prefix .. 'reads:' .. ARGV[1]), queued}
