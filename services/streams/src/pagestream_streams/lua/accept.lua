-- Accepts a request: writes its record and its queue entry, and registers the gateway as its reader. Retry: harmless, a known id is only read.
-- ARGV: id, spec, tenant, class, prompt tokens, choices, deadline in ms from now (0: none), disconnect grace in ms, continue on disconnect
--       (0 | 1), gateway id ('' : none), gateway lease in ms, most requests, most prompt tokens, doorbell channel, partition number
-- Returns {1} accepted, {2} known already, {0, requests, tokens, drained, drain window in ms} over a bound.
local id, spec, tenant, class, tokens, choices = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local deadline, grace, continue, gateway, lease = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local max_requests, max_tokens = tonumber(ARGV[12]), tonumber(ARGV[13])
local req, meta, now = prefix .. 'req:' .. id, prefix .. 'meta', now_ms()

local known = call('HMGET', req, 'state', 'readers')
if not known[1] then
  local requests = call('XLEN', prefix .. 'queue:' .. class)
  local state = call('HMGET', meta, 'tokens:' .. class, 'classes', 'drain_from', 'drained')
  local queued = tonumber(state[1] or 0)
  if requests + 1 > max_requests or queued + tokens > max_tokens then
    return {0, requests, queued, tonumber(state[4] or 0), now - tonumber(state[3] or now)}
  end
  call('HSET', req, 'spec', spec, 'tenant', tenant, 'class', class, 'ptok', tokens, 'choices', choices, 'ctok', 0, 'cached', 0,
    'state', 'queued', 'epoch', 0, 'nonce', '', 'owner', '', 'next', 0, 'digest', '', 'readers', '', 'attempts', 0,
    'accepted', now, 'deadline', deadline > 0 and now + deadline or 0, 'grace', grace, 'continue', continue)
  local classes = state[2] or ' '
  if not string.find(classes, ' ' .. class .. ' ', 1, true) then
    call('HSET', meta, 'classes', classes .. class .. ' ')
  end
  call('HINCRBY', meta, 'tokens:' .. class, tokens)
  enqueue(id, class, tokens)
  if deadline > 0 then
    call('ZADD', prefix .. 'deadlines', now + deadline, id)
  end
end
if gateway ~= '' and known[1] ~= 'finished' then
  add_reader(id, known[2] or '', gateway)
  call('ZADD', prefix .. 'gateways', now + lease, gateway)
end
call('PUBLISH', ARGV[14], ARGV[15])
return {known[1] and 2 or 1}
