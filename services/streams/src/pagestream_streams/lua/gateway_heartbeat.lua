-- Renews a gateway's lease in this partition. Retry: harmless.
-- ARGV: gateway id, lease in ms
-- Returns {number of requests that it is registered for here, requests queued here}.
local queued = call('XLEN', prefix .. 'queue:resume')
for class in string.gmatch(call('HGET', prefix .. 'meta', 'classes') or '', '%d+') do
  queued = queued + call('XLEN', prefix .. 'queue:' .. class)
end
call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])
return {call('SCARD', prefix .. 'reads:' .. ARGV[1]), queued}
