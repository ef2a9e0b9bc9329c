-- Read the outline of a partition's queues: how much waits, since when, and how fast it drains.
-- Run by: admin/queue_positions.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] most entries to read from either end of a queue, [2] drain window in ms
-- Returns: {prompt tokens claimed in the drain window, length of that window in ms, how classes are ordered (0: by
--           arrival, 1: by ranks, 2: by ranks whatever the class),
--          {queue, requests, tokens (-1: unknown), {id, tokens, id, tokens...} of its first entries, the same of its
--           last entries, the last one first}...}. Where classes are ordered by ranks, an id is "<rank>-0".
-- Retry: harmless, it only reads.
local meta, now, most = prefix .. 'meta', now_ms(), tonumber(ARGV[1])
local state = call('HMGET', meta, 'classes', 'prints', 'drain_from', 'drained_tokens', 'policy')
local span = drain_span(state[3], now)
local is_fresh = span and span <= 2 * ARGV[2]
local answer = {is_fresh and tonumber(state[4] or 0) or 0, is_fresh and span or 0,
  not RANKED[state[5]] and 0 or state[5] == 'fair' and 2 or 1}

local function flat(entries)
  local result = {}
  for _, entry in ipairs(entries) do
    result[#result + 1], result[#result + 2] = entry[1], tonumber(entry[2][4])
  end
  return result
end

-- The first entries of a class' queue by their ranks, or its last ones, the last one first.
local function ranked(name, command)
  local result = {}
  local ranks = call(command, prefix .. 'ranks:' .. name, 0, most - 1, 'WITHSCORES')
  for i = 1, #ranks, 2 do
    local entry = call('XRANGE', prefix .. 'queue:' .. name, ranks[i], ranks[i])[1]
    if entry then
      result[#result + 1], result[#result + 2] = ranks[i + 1] .. '-0', tonumber(entry[2][4])
    end
  end
  return result
end

local function add(name)
  local queue = prefix .. 'queue:' .. name
  local length = call('XLEN', queue)
  if length > 0 then
    local is_ranked = tonumber(name) and RANKED[state[5]]
    local first = is_ranked and ranked(name, 'ZRANGE') or flat(call('XRANGE', queue, '-', '+', 'COUNT', most))
    local last = length <= most and {} or is_ranked and ranked(name, 'ZREVRANGE')
      or flat(call('XREVRANGE', queue, '+', '-', 'COUNT', most))
    local tokens = tonumber(name) and tonumber(call('HGET', meta, 'tokens:' .. name) or 0) or -1
    answer[#answer + 1] = {name, length, tokens, first, last}
  end
end
for class in string.gmatch(state[1] or '', '%d+') do
  add(class)
end
add('resume')
for print in string.gmatch(state[2] or '', '%S+') do
  add('resume:' .. print)
end
return answer
