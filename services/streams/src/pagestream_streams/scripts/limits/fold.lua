-- Count what ended requests of one tenant and one partition used, each once, and settle their reservations.
--
-- The entries are those of the partition's stream `ended`, in its order and without a gap for this tenant. Those up to
-- folded:<partition> were counted before. The set `ended` has the ids of the last minutes: a request that Redis had
-- lost may run, and end, twice.
-- Run by: limits.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] name of the partition, [2] ms for which ids are kept, [3] hours and [4] days for which usage is kept
--       (0: none), [5] most fields of an hour or a day
--       then for each entry: its position, request id, credential, model, requests (0 | 1), prompt tokens, those of
--       them that were cached, output tokens, ms at which it was accepted and at which it ended
-- Returns: for each entry, whether it is counted by this run (0 | 1).
-- Retry: harmless, what is folded is skipped.
local WIDTH, FIRST, HOUR, DAY_MS = 10, 6, 3600000, 86400000
local OTHERS = '(others)'
local NAMES = {'requests', 'prompt', 'cached', 'output'}
local now, state, out, sums = now_ms(), prefix .. 'state', {}, {}
although_full()

local function parts(position)
  local ms, number = string.match(position, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end
local field = 'folded:' .. ARGV[1]
local last_ms, last_number = parts(call('HGET', state, field) or '0-0')
local newest

local function add(name, credential, model, values)
  local fields = sums[name] or {}
  sums[name] = fields
  local whose = credential .. '\n' .. model
  fields[whose] = fields[whose] or {0, 0, 0, 0}
  for place, value in ipairs(values) do
    fields[whose][place] = fields[whose][place] + value
  end
end

for i = FIRST, #ARGV, WIDTH do
  local ms, number = parts(ARGV[i])
  local id, is_new = ARGV[i + 1], 0
  if ms > last_ms or ms == last_ms and number > last_number then
    last_ms, last_number, newest = ms, number, ARGV[i]
    local prompt, cached, output = tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])
    local accepted, ended = tonumber(ARGV[i + 8]), tonumber(ARGV[i + 9])
    if call('ZADD', prefix .. 'ended', 'NX', now, id) == 1 then
      is_new = 1
      local values = {tonumber(ARGV[i + 4]), prompt, cached, output}
      add('usage:h:' .. math.floor(ended / HOUR), ARGV[i + 2], ARGV[i + 3], values)
      add('usage:d:' .. math.floor(ended / DAY_MS), ARGV[i + 2], ARGV[i + 3], values)
    end
    local held = read_held(id)
    if held then
      settle(held, prompt + output, 0, now)
      forget_held(id, held)
      local took = math.max(0, ended - accepted)
      local before = tonumber(call('HGET', state, 'run_ms') or took)
      call('HSET', state, 'run_ms', math.floor(before + (took - before) / 8))
    end
  end
  out[#out + 1] = is_new
end

for name, fields in pairs(sums) do
  local key = prefix .. name
  local size = call('HLEN', key)
  for whose, values in pairs(fields) do
    for place, value in ipairs(values) do
      local each = NAMES[place] .. '\n' .. whose
      if size >= tonumber(ARGV[5]) and call('HEXISTS', key, each) == 0 then
        each = NAMES[place] .. '\n' .. OTHERS .. '\n' .. string.match(whose, '\n(.*)$')
      end
      if value > 0 then
        call('HINCRBY', key, each, value)
      end
    end
  end
  local is_hour = string.sub(name, 1, 8) == 'usage:h:'
  call('PEXPIRE', key, is_hour and ARGV[3] * HOUR or ARGV[4] * DAY_MS) -- 0: it goes at once
end
if newest then
  call('HSET', state, field, newest)
  call('PEXPIRE', state, math.max(2, ARGV[4]) * DAY_MS)
  call('ZREMRANGEBYSCORE', prefix .. 'ended', '-inf', now - ARGV[2])
  call('PEXPIRE', prefix .. 'ended', ARGV[2])
end
return out
