-- Read how much waits and runs in a partition, for metrics and scaling.
-- Run by: admin/observation.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] drain window in ms, [2] most entries of a queue that are looked at, the rest is extrapolated
--       [3] how long a request waits for an engine with its fingerprint or context, in ms
--       [4] the longest context of a living engine (0 or '': any, or none lives)
--       [5] the living engines' fingerprints, each between spaces ('': any, or none lives)
-- Returns: {requests that engines own, prompt tokens claimed in the drain window, length of that window in ms,
--          tokens of the largest request claimed in it,
--          {queue, requests, tokens, ms that its oldest has waited, tokens that a living engine may take, ms that the
--           oldest of these has waited, tokens of their largest, tokens claimed in the drain window, output tokens
--           that are expected of what a living engine may take}...}.
--          Queues are the classes, "resume" (begun requests that wait for another engine) and "suspect".
-- Retry: harmless, it only reads.
local meta, now, most = prefix .. 'meta', now_ms(), tonumber(ARGV[2])
local patience, context, prints = tonumber(ARGV[3]), tonumber(ARGV[4]) or 0, ARGV[5]
local state = call('HMGET', meta, 'classes', 'prints', 'drain_from', 'drained_tokens', 'drained_longest')

local running = 0
for _, engine in ipairs(call('ZRANGE', prefix .. 'leases', 0, -1)) do
  running = running + call('SCARD', prefix .. 'owned:' .. engine)
end

-- How long the head of a queue has waited, in ms.
local function oldest(name)
  local first = call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', 1)[1]
  return first and math.max(0, now - tonumber(string.match(first[1], '^%d+'))) or 0
end

-- What of a queue a living engine may take, from its first entries: {all tokens, tokens that may be taken, ms that the
-- oldest of these has waited, tokens of their largest}. What is left to other engines may be taken `patience` later,
-- and waits only since then.
local function takeable(name, length, print)
  local all, taken, longest, waited, seen = 0, 0, 0, 0, 0
  local is_left = print ~= '' and prints ~= '' and not string.find(prints, ' ' .. print .. ' ', 1, true)
  for _, entry in ipairs(call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', most)) do
    local tokens, age = tonumber(entry[2][4]), math.max(0, now - tonumber(string.match(entry[1], '^%d+')))
    seen, all = seen + 1, all + tokens
    if is_left or context > 0 and tonumber(call('HGET', prefix .. 'req:' .. entry[2][2], 'context') or 0) > context then
      age = age - patience
    end
    if age >= 0 then
      taken, longest, waited = taken + tokens, math.max(longest, tokens), math.max(waited, age)
    end
  end
  local rest = seen > 0 and length / seen or 0
  return {math.floor(all * rest), math.floor(taken * rest), waited, longest}
end

local window = drain_span(state[3], now)
local old = not window or window > 2 * tonumber(ARGV[1])
window = window or 0
local answer = {running, old and 0 or tonumber(state[4] or 0), window, old and 0 or tonumber(state[5] or 0)}

for class in string.gmatch(state[1] or '', '%d+') do
  local found = call('HMGET', meta, 'tokens:' .. class, 'drained_tokens:' .. class, 'outputs:' .. class)
  local tokens, length = tonumber(found[1] or 0), call('XLEN', prefix .. 'queue:' .. class)
  local part = takeable(class, length, '')
  local taken = part[1] > 0 and math.floor(tokens * part[2] / part[1]) or 0
  answer[#answer + 1] = {class, length, tokens, oldest(class), taken, part[3], part[4],
    old and 0 or tonumber(found[2] or 0),
    part[1] > 0 and math.floor(tonumber(found[3] or 0) * part[2] / part[1]) or 0}
end

local resumed = {'resume', 0, 0, 0, 0, 0, 0, 0, 0}
local function add(name, print)
  local length = call('XLEN', prefix .. 'queue:' .. name)
  if length > 0 then
    local part = takeable(name, length, print)
    resumed[2], resumed[3], resumed[4] = resumed[2] + length, resumed[3] + part[1], math.max(resumed[4], oldest(name))
    resumed[5], resumed[6] = resumed[5] + part[2], math.max(resumed[6], part[3])
    resumed[7] = math.max(resumed[7], part[4])
  end
end
add('resume', '')
for print in string.gmatch(state[2] or '', '%S+') do
  add('resume:' .. print, print)
end
answer[#answer + 1] = resumed

local suspects = call('ZCARD', prefix .. 'suspects') + call('ZCARD', prefix .. 'verdicts')
if suspects > 0 then
  local first = call('ZRANGE', prefix .. 'suspects', 0, 0, 'WITHSCORES')
  -- A suspect waits for an engine that is idle, not for more engines.
  answer[#answer + 1] = {'suspect', suspects, 0, first[2] and math.max(0, now - first[2]) or 0, 0, 0, 0, 0, 0}
end
return answer
