-- Read how much waits and runs in a partition, for metrics and scaling.
-- Run by: admin/queues.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] drain window in ms, [2] most entries of a queue of begun requests whose tokens are counted
-- Returns: {requests that engines own, prompt tokens claimed in the drain window, length of that window in ms,
--          {queue, requests, tokens, ms that its oldest has waited}...}. Queues are the classes, "resume" (begun
--          requests that wait for another engine) and "suspect".
-- Retry: harmless, it only reads.
local meta, now, most = prefix .. 'meta', now_ms(), tonumber(ARGV[2])
local state = call('HMGET', meta, 'classes', 'prints', 'drain_from', 'drained_tokens')

local running = 0
for _, engine in ipairs(call('ZRANGE', prefix .. 'leases', 0, -1)) do
  running = running + call('SCARD', prefix .. 'owned:' .. engine)
end

-- How long the head of a queue has waited, in ms.
local function oldest(name)
  local first = call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', 1)[1]
  return first and math.max(0, now - tonumber(string.match(first[1], '^%d+'))) or 0
end

-- The tokens of a queue, extrapolated from its first entries.
local function tokens_of(name, length)
  local sum, seen = 0, 0
  for _, entry in ipairs(call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', most)) do
    sum, seen = sum + entry[2][4], seen + 1
  end
  return seen > 0 and math.floor(sum * length / seen) or 0
end

local window = state[3] and math.max(0, now - state[3]) or 0
local old = window > 2 * tonumber(ARGV[1])
local answer = {running, old and 0 or tonumber(state[4] or 0), window}

for class in string.gmatch(state[1] or '', '%d+') do
  local tokens = tonumber(call('HGET', meta, 'tokens:' .. class) or 0)
  answer[#answer + 1] = {class, call('XLEN', prefix .. 'queue:' .. class), tokens, oldest(class)}
end

local resumed = {'resume', 0, 0, 0}
local function add(name)
  local length = call('XLEN', prefix .. 'queue:' .. name)
  if length > 0 then
    resumed[2], resumed[3] = resumed[2] + length, resumed[3] + tokens_of(name, length)
    resumed[4] = math.max(resumed[4], oldest(name))
  end
end
add('resume')
for print in string.gmatch(state[2] or '', '%S+') do
  add('resume:' .. print)
end
answer[#answer + 1] = resumed

local suspects = call('ZCARD', prefix .. 'suspects') + call('ZCARD', prefix .. 'verdicts')
if suspects > 0 then
  local first = call('ZRANGE', prefix .. 'suspects', 0, 0, 'WITHSCORES')
  answer[#answer + 1] = {'suspect', suspects, 0, first[2] and math.max(0, now - first[2]) or 0}
end
return answer
