-- Renews an engine's lease in this partition. An engine that was taken for dead by its lease takes back what its death counted for.
-- Retry: harmless.
-- ARGV: engine id, lease in ms, whether it can hand everything back to run a suspect alone (0 | 1), how long a suspect waits for an idle engine
--       in ms, control time in ms, its numerics fingerprint ('': unknown), how long a suspect that began with another one waits for such an
--       engine in ms
-- Returns {the ids that it owns, 0: no suspect that it may run waits here, 1: one waits for an idle engine, 2: and this one was chosen to become that}.
local engine, lease, patience, control, now = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), now_ms()
although_full()
call('ZADD', prefix .. 'leases', now + lease, engine)
call('HSETNX', prefix .. 'meta', 'up', now)

local function without(text)
  local rest = ''
  for each in string.gmatch(text or '', '%S+') do
    if each ~= engine then
      rest = rest .. each .. ' '
    end
  end
  return rest
end

local function take_back(id)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'state', 'died_on', 'died_alone')
  if not found[1] or found[1] == 'finished' then
    return
  end
  local on, alone = without(found[2]), without(found[3])
  call('HSET', req, 'died_on', on, 'died_alone', alone)
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

local function wanted()
  if call('ZCARD', prefix .. 'suspects') == 0 or not control_is_over(now, control) then
    return 0
  end
  local id, since = first_suspect(ARGV[6], tonumber(ARGV[7]), now)
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

return {call('SMEMBERS', prefix .. 'owned:' .. engine), wanted()}
