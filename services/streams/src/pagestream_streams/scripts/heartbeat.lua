-- Renew an engine's lease in this partition.
--
-- An engine that lost its lease and beats again lived: what its death counted for is taken back.
-- Run by: engine/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua); prefixes of other
--       partitions may follow the arguments.
-- ARGV: [1] engine id, [2] lease in ms
--       [3] whether it can hand back all it holds, to run a suspect isolated (0 | 1)
--       [4] how long a suspect waits for an idle engine in ms, [5] control time in ms (see prelude.lua)
--       [6] the engine's fingerprint ('': unknown)
--       [7] how long begun requests wait for an engine with their fingerprint, in ms
--       [8] the context that the engine holds (0 or none: any)
--       [9] how long suspects that need a longer context are left to others, in ms (negative: for ever)
--       [10] the engine's policy, by which requests are claimed ('' or none: unknown), and [11] when it started (0: it
--            starts now): of several living engines with different ones the last that started decides
--       [12] the least class that the engine asks gateways to refuse ('': none), see accept.lua
-- Returns: for each partition {the ids that it owns, whether a suspect that it may run waits here (0: no, 1: yes, for
--          an idle engine, 2: yes, and this engine was chosen to become idle), now}.
-- Retry: harmless, the lease is renewed again.
local engine, lease, patience = ARGV[1], ARGV[2], tonumber(ARGV[4])
local control, now = tonumber(ARGV[5]), now_ms()
although_full()
call('ZADD', prefix .. 'leases', now + lease, engine)
call('HSETNX', prefix .. 'meta', 'up', now)
if (ARGV[12] or '') == '' then
  call('HDEL', prefix .. 'refusals', engine)
else
  call('HSET', prefix .. 'refusals', engine, ARGV[12])
end

-- Has the queues go by this engine's policy, unless they go by that of a living one that started later.
-- Fields of meta: policy, policy_by (the engine that decides), policy_from (when it started), and policy_since (since
-- when the queues have gone by this policy).
local function set_policy(policy, started)
  local meta = prefix .. 'meta'
  local found = call('HMGET', meta, 'policy', 'policy_by', 'policy_from', 'classes')
  local lease = found[2] and tonumber(call('ZSCORE', prefix .. 'leases', found[2]) or 0) or 0
  if lease > now and (found[2] == engine or tonumber(found[3]) >= started) then
    return
  end
  call('HSET', meta, 'policy', policy, 'policy_by', engine, 'policy_from', started)
  if found[1] ~= policy then
    call('HSET', meta, 'policy_since', now)
    for class in string.gmatch(found[4] or '', '%d+') do
      call('DEL', prefix .. 'ranks:' .. class)
    end
  end
end
if (ARGV[10] or '') ~= '' then
  set_policy(ARGV[10], ARGV[11] == '0' and now or tonumber(ARGV[11]))
end

-- A list of engine ids without this engine's.
local function without(text)
  local rest = ''
  for each in string.gmatch(text or '', '%S+') do
    if each ~= engine then
      rest = rest .. each .. ' '
    end
  end
  return rest
end

-- Removes this engine's death from a request, which then is no suspect because of it.
local function take_back(id)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'state', 'died_on', 'died_alone')
  if not found[1] or found[1] == 'finished' then
    return
  end
  local on, alone = without(found[2]), without(found[3])
  call('HSET', req, 'died_on', on, 'died_alone', alone)
  if call('HGET', req, 'stalled') == engine then
    call('HDEL', req, 'stalled')
  end
  local waits = call('ZREM', prefix .. 'suspects', id) + call('ZREM', prefix .. 'verdicts', id)
  if waits > 0 then
    requeue(id, engine, now)
  end
end

if call('EXISTS', prefix .. 'lapsed:' .. engine) == 1 then
  for _, id in ipairs(call('SMEMBERS', prefix .. 'lapsed:' .. engine)) do
    take_back(id)
  end
  call('DEL', prefix .. 'lapsed:' .. engine)
end
call('ZREM', prefix .. 'deaths', engine)
if call('ZREM', prefix .. 'deaths', '!' .. engine) > 0 then
  call('HDEL', prefix .. 'meta', 'alone_died')
end

-- The second part of the reply.
local function wanted()
  if call('ZCARD', prefix .. 'suspects') == 0 or not control_is_over(now, control) then
    return 0
  end
  local id, since = first_suspect(ARGV[6], tonumber(ARGV[8] or 0), tonumber(ARGV[7]), tonumber(ARGV[9]), now)
  if not id then
    return 0
  end
  local chosen = call('GET', prefix .. 'vacating')
  if ARGV[3] ~= '1' or now - since < patience or chosen and chosen ~= engine then
    return 1
  end
  call('SET', prefix .. 'vacating', engine, 'PX', lease)
  return 2
end

return {call('SMEMBERS', prefix .. 'owned:' .. engine), wanted(), now}
