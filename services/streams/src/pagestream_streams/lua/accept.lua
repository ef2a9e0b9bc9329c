-- Accepts a request: writes its record and its queue entry, and registers the gateway as its reader. Retry: harmless, a known id is only read.
-- A tenant may use a class' bounds up to its share: all of them (or less, see below) while no other waits, else by its weight among those that wait.
-- ARGV: id, spec, tenant, class, prompt tokens, choices, deadline in ms from now (0: none), disconnect grace in ms, continue on disconnect
--       (0 | 1), gateway id ('' : none), gateway lease in ms, most requests, most prompt tokens, doorbell channel, partition number,
--       weight of the tenant, share of a tenant that is alone in percent, whether bounds count (0: it was accepted before and got lost), the
--       context that it needs at least: the tokens of its longest prompt and one more (0 or none: any will do)
-- Returns {1} accepted, {2} known already, {3} another tenant's, {0, requests, tokens, drained, drain window in ms, most requests, most tokens,
--         whose bounds: all tenants' 0, the tenant's own 1} over a bound.
local id, spec, tenant, class, tokens, choices = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local deadline, grace, continue, gateway, lease = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local max_requests, max_tokens = tonumber(ARGV[12]), tonumber(ARGV[13])
local req, meta, now = prefix .. 'req:' .. id, prefix .. 'meta', now_ms()

local weight, alone_share, bounded = tonumber(ARGV[16]), tonumber(ARGV[17]) / 100, ARGV[18] == '1'

-- What the tenant has queued, and what it may have: {requests, tokens, most requests, most tokens}.
local function portion()
  local key = prefix .. 'tenants:' .. class
  local mine = call('HMGET', key, 'r' .. tenant, 't' .. tenant, 'w' .. tenant)
  local others = (call('HGET', meta, 'weights:' .. class) or 0) - (mine[3] or 0)
  local share = others > 0 and weight / (weight + others) or alone_share
  return {tonumber(mine[1] or 0), tonumber(mine[2] or 0), math.max(1, math.floor(max_requests * share)), math.floor(max_tokens * share)}
end

local known = call('HMGET', req, 'state', 'readers', 'tenant')
if known[3] and known[3] ~= tenant then
  return {3}
end
if not known[1] then
  local requests = call('XLEN', prefix .. 'queue:' .. class)
  local state = call('HMGET', meta, 'tokens:' .. class, 'classes', 'drain_from', 'drained')
  local queued = tonumber(state[1] or 0)
  local drained, window = tonumber(state[4] or 0), now - tonumber(state[3] or now)
  if bounded and (requests + 1 > max_requests or queued + tokens > max_tokens) then
    return {0, requests, queued, drained, window, max_requests, max_tokens, 0}
  end
  local mine = portion()
  -- One request of any size is everybody's.
  if bounded and mine[1] > 0 and (mine[1] + 1 > mine[3] or mine[2] + tokens > mine[4]) then
    return {0, mine[1], mine[2], drained, window, mine[3], mine[4], 1}
  end
  call('HSET', req, 'spec', spec, 'tenant', tenant, 'class', class, 'ptok', tokens, 'choices', choices, 'others', 0, 'cached', 0,
    'state', 'queued', 'epoch', 0, 'nonce', '', 'owner', '', 'next', 0, 'digest', '', 'readers', '', 'attempts', 0,
    'accepted', now, 'deadline', deadline > 0 and now + deadline or 0, 'grace', grace, 'continue', continue, 'context', ARGV[19] or 0)
  local classes = state[2] or ' '
  if not string.find(classes, ' ' .. class .. ' ', 1, true) then
    call('HSET', meta, 'classes', classes .. class .. ' ')
  end
  if bounded then
    call('HINCRBY', meta, 'tokens:' .. class, tokens)
    charge(class, tenant, tokens, weight)
    enqueue(id, class, tokens)
  else
    enqueue(id, 'resume', tokens)
  end
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
