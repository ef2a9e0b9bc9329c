-- Do what time alone brings about in a partition.
--
-- Reclaim what dead engines own, start the graces of dead gateways' reads, and return the requests whose deadline,
-- grace or verdict is due (end.lua ends them). After a gateway's death no grace starts before its clients can have
-- noticed. After a hole in the sweeps, or on another Redis process than before, every lease and grace starts anew in
-- full; after a time in which no gateway lived, every grace does. Time in which Redis is full doesn't count for graces.
-- Run by: admin/sweeper.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua); prefixes of other
--       partitions of the model may follow the arguments.
-- ARGV: [1] least distance of two sweeps in ms, [2] hole in ms, [3] engine lease in ms, [4] gateway lease in ms
--       [5] most requests to reclaim in all partitions, [6] control time in ms (see prelude.lua)
--       [7] window in ms in which an engine's death counts as evidence that requests it did not run are innocent
--       [8] what a client may need to notice a silent gateway, in ms
-- Returns: for each partition {reclaimed ids, ids past their deadline, ids past their grace, restarted (0 | 1),
--          {id, index, deaths}... of requests to quarantine, whether it has anything that time can change (0 | 1),
--          how many ended requests wait to be counted}.
-- Retry: harmless, a partition that was just swept is skipped.
local meta, now = prefix .. 'meta', now_ms()
local interval, hole, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[5])
local lease, gateway_lease = tonumber(ARGV[3]), tonumber(ARGV[4])
local control, window, silence = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local last = call('HMGET', meta, 'swept', 'run_id', 'deserted')
run.id = run.id or string.match(call('INFO', 'server'), 'run_id:(%x+)')
local restarted = not last[1] or last[2] ~= run.id or now - last[1] > hole or now < tonumber(last[1])

-- Whether an engine holds a lease here, or a request is unfinished, or not counted.
local function is_busy()
  local names = {}
  for _, name in ipairs({'leases', 'deadlines', 'graces', 'suspects', 'verdicts'}) do
    names[#names + 1] = prefix .. name
  end
  if call('EXISTS', unpack(names)) > 0 or call('XLEN', prefix .. 'queue:resume') > 0
    or call('XLEN', prefix .. 'ended') > 0 then
    return 1
  end
  local known = call('HMGET', meta, 'classes', 'prints')
  for class in string.gmatch(known[1] or '', '%S+') do
    if call('XLEN', prefix .. 'queue:' .. class) > 0 then
      return 1
    end
  end
  for print in string.gmatch(known[2] or '', '%S+') do
    if call('XLEN', prefix .. 'queue:resume:' .. print) > 0 then
      return 1
    end
  end
  return 0
end

if not restarted and now - last[1] < interval then
  return {{}, {}, {}, 0, {}, is_busy(), call('XLEN', prefix .. 'ended')}
end
-- A write that needs memory comes first in a run, and shows by its refusal that Redis is full.
local swept = redis.pcall('HSET', meta, 'swept', now, 'run_id', run.id)
local refused = type(swept) == 'table' and swept.err
if refused then
  if not string.find(refused, 'OOM', 1, true) then
    error(refused)
  end
  run.is_full = true
  although_full()
  call('HSET', meta, 'swept', now, 'run_id', run.id)
end
local full = run.is_full

local function postpone(key, length)
  for _, member in ipairs(call('ZRANGE', prefix .. key, 0, -1)) do
    call('ZADD', prefix .. key, now + length, member)
  end
end
-- Starts each grace anew, but leaves it no more than what it had left at `since`; 0: the whole grace.
local function restart_graces(since)
  local graces = call('ZRANGE', prefix .. 'graces', 0, -1, 'WITHSCORES')
  for i = 1, #graces, 2 do
    local id, rest = graces[i], graces[i + 1] + now - since
    call('ZREM', prefix .. 'graces', id)
    starts_grace(id, now)
    local whole = call('ZSCORE', prefix .. 'graces', id)
    if whole and rest < tonumber(whole) then
      call('ZADD', prefix .. 'graces', rest, id)
    end
  end
end
local function due(key)
  return call('ZRANGEBYSCORE', prefix .. key, '-inf', now, 'LIMIT', 0, most)
end

if restarted then
  postpone('leases', lease)
  postpone('gateways', gateway_lease)
  restart_graces(0)
  call('HDEL', meta, 'up')
  for _, key in ipairs({'suspects', 'verdicts'}) do
    for _, id in ipairs(call('ZRANGEBYSCORE', prefix .. key, '(' .. now + control, '+inf')) do
      call('ZADD', prefix .. key, now, id)
    end
  end
end

local reclaimed = {}
for _, engine in ipairs(due('leases')) do
  local left = most - run.moved
  if left > 0 then
    local owned, lapsed = call('SRANDMEMBER', prefix .. 'owned:' .. engine, left), prefix .. 'lapsed:' .. engine
    for _, id in ipairs(owned) do
      if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then
        if requeue_after_death(id, engine, now, control) then
          -- The engine may live, cut off from Redis: its next heartbeat then takes the death back.
          call('SADD', lapsed, id)
          call('PEXPIRE', lapsed, KEPT_DEATHS_MS)
        end
        reclaimed[#reclaimed + 1] = id
        run.moved = run.moved + 1
      else
        disown(id, engine)
      end
    end
    note_death(engine, now)
    if #owned < left then
      drop_lease(engine, now)
    end
  end
end
-- Engines claim what is queued again.
local function ring()
  local key_prefix, model, number = string.match(prefix, '^([^:]*):{(.*)/(%d+)}:$')
  call('PUBLISH', key_prefix .. ':bell:' .. model, number)
end
if #reclaimed > 0 then
  ring()
end

for _, gateway in ipairs(due('gateways')) do
  for _, id in ipairs(call('SMEMBERS', prefix .. 'reads:' .. gateway)) do
    if call('EXISTS', prefix .. 'req:' .. id) == 1 then
      call('HSET', prefix .. 'req:' .. id, 'silent', now + silence)
    end
    remove_reader(id, gateway, now)
  end
  call('ZREM', prefix .. 'gateways', gateway)
end
-- Time in which no gateway lives, or Redis is full, doesn't count for graces: no client could be sure to reconnect. The
-- field "deserted" is since when they don't count, 0 where they begin anew in full, after a time without gateways.
-- Redis may be full in every other sweep, and a grace has to end all the same.
local abandoned = {}
if call('ZCARD', prefix .. 'gateways') == 0 then
  call('HSET', meta, 'deserted', 0)
elseif full then
  if restarted or not last[3] then
    call('HSET', meta, 'deserted', now)
  end
else
  if last[3] then
    call('HDEL', meta, 'deserted')
    if not restarted then
      restart_graces(tonumber(last[3]))
    end
  end
  abandoned = due('graces')
end

-- Other engines' deaths acquit at once. The deaths so far are judged with the acquittal, and no longer counted.
local acquitted, poison = {}, {}
for _, id in ipairs(call('ZRANGE', prefix .. 'verdicts', 0, -1)) do
  local found = call('HMGET', prefix .. 'req:' .. id, 'died_on', 'died_first', 'died_near')
  if found[1] and storms(found[1] .. (found[3] or ''), found[2], now, window) then
    call('HSET', prefix .. 'req:' .. id, 'died_alone', '', 'died_first', now)
    call('ZREM', prefix .. 'verdicts', id)
    call('ZADD', prefix .. 'suspects', now, id)
    acquitted[#acquitted + 1] = id
  end
end
if #acquitted > 0 then
  ring()
end
if call('ZCARD', prefix .. 'verdicts') > 0 and control_is_over(now, control) then
  for _, id in ipairs(due('verdicts')) do
    local found = call('HMGET', prefix .. 'req:' .. id, 'died_on', 'next')
    poison[#poison + 1] = {id, found[2] or '0', words(found[1] or '')}
  end
end
return {reclaimed, due('deadlines'), abandoned, restarted and 1 or 0, poison, is_busy(),
  call('XLEN', prefix .. 'ended')}
