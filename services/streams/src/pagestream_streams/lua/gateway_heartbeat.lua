-- Renews a gateway's lease in this partition. Retry: harmless.
-- ARGV: gateway id, lease in ms
-- Returns {number of requests that it is registered for here, requests queued here}.
local known = call('HMGET', prefix .. 'meta', 'classes', 'prints')
local queued = call('XLEN', prefix .. 'queue:resume') + call('ZCARD', prefix .. 'suspects') + call('ZCARD', prefix .. 'verdicts')
for class in string.gmatch(known[1] or '', '%d+') do
  queued = queued + call('XLEN', prefix .. 'queue:' .. class)
end
for print in string.gmatch(known[2] or '', '%S+') do
  queued = queued + call('XLEN', prefix .. 'queue:resume:' .. print)
end
although_full()
call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])
return {call('SCARD', prefix .. 'reads:' .. ARGV[1]), queued}
