-- What time alone brings about in a partition: reclaims what dead engines own, moves dead gateways' reads to their grace, and names the requests
-- whose deadline or grace is due (end.lua ends them). After a hole in the sweeps, or on another Redis process than before, every lease and grace
-- starts anew in full instead. Retry: harmless.
-- ARGV: least distance of two sweeps in ms, hole in ms, engine lease in ms, gateway lease in ms, most reclaimed, doorbell channel, partition number
-- Returns {reclaimed ids, ids over their deadline, ids over their grace, restarted (0 | 1)}.
local meta, now = prefix .. 'meta', now_ms()
local interval, hole, lease, gateway_lease, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local last = call('HMGET', meta, 'swept', 'run_id', 'deserted')
local run_id = string.match(call('INFO', 'server'), 'run_id:(%x+)')
local restarted = not last[1] or last[2] ~= run_id or now - last[1] > hole or now < tonumber(last[1])
if not restarted and now - last[1] < interval then
  return {{}, {}, {}, 0}
end
call('HSET', meta, 'swept', now, 'run_id', run_id)

local function postpone(key, length)
  for _, member in ipairs(call('ZRANGE', prefix .. key, 0, -1)) do
    call('ZADD', prefix .. key, now + length, member)
  end
end
local function restart_graces()
  for _, id in ipairs(call('ZRANGE', prefix .. 'graces', 0, -1)) do
    call('ZREM', prefix .. 'graces', id)
    starts_grace(id, now)
  end
end
local function due(key)
  return call('ZRANGEBYSCORE', prefix .. key, '-inf', now, 'LIMIT', 0, most)
end

if restarted then
  postpone('leases', lease)
  postpone('gateways', gateway_lease)
  restart_graces()
end

local reclaimed = {}
for _, engine in ipairs(due('leases')) do
  local left = most - #reclaimed
  if left > 0 then
    local owned = call('SRANDMEMBER', prefix .. 'owned:' .. engine, left)
    for _, id in ipairs(owned) do
      if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then
        requeue(id, engine)
        reclaimed[#reclaimed + 1] = id
      else
        disown(id, engine)
      end
    end
    if #owned == 0 then
      call('ZREM', prefix .. 'leases', engine)
    end
  end
end
if #reclaimed > 0 then
  call('PUBLISH', ARGV[6], ARGV[7])
end

for _, gateway in ipairs(due('gateways')) do
  for _, id in ipairs(call('SMEMBERS', prefix .. 'reads:' .. gateway)) do
    remove_reader(id, gateway, now)
  end
  call('ZREM', prefix .. 'gateways', gateway)
end
-- Nobody could come back while no gateway lived: that time doesn't count.
local abandoned = {}
if call('ZCARD', prefix .. 'gateways') == 0 then
  call('HSET', meta, 'deserted', 1)
elseif last[3] then
  call('HDEL', meta, 'deserted')
  restart_graces()
else
  abandoned = due('graces')
end
return {reclaimed, due('deadlines'), abandoned, restarted and 1 or 0}
