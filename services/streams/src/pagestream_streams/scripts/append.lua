-- Append entries to the logs of many requests, and wake their readers.
--
-- Each append is fenced by the claim's epoch and nonce, and has to continue its log. Entries that the log has already
-- are compared by digest and skipped. A step's requests come in one run: those of one partition in a cluster, else
-- those of all, so that each gateway gets one wake-up.
-- Run by: engine/session.py.
-- KEYS: the prefix of the first partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] retention in ms
--       [2] a JSON array, since one of its values costs less than one argument of a command. For each partition: the
--           prefix of its keys, and an array. In this for each request: id, epoch (a string), nonce, first index,
--           cached prompt tokens ('': unchanged), number of entries, bytes of its wake-up; then six values for each
--           entry, numbers as strings: kind, choice, value, text, digest, extra
--             kind 't': value is the token id, text its text, extra its logprobs
--             kind 'f': value is the reason, text the text held back, extra the stop reason
--             kind 'e': choice is the second of the end ('': unknown), value the reason, text the usage, extra the error
--             kind 'p': value is how far the parts of the prompt go, extra the part
--           Logprobs and parts are bytes, which JSON can't hold: '' for none, else their index in ARGV.
--       [3] prefix of the gateways' channels, to which the wake-ups are published, one message for each gateway; '':
--           the caller does that
--       [4] the wake-ups, one after another; '' where the caller publishes them
--       [5...] the bytes
-- Returns: {others, readers}. Requests count from 0 through all partitions.
--          others: a request, its outcome and the log's next index, for each whose outcome is not OK, or whose log ends
--          elsewhere than with its entries. Outcomes are AppendKind in records.py.
--          readers, where ARGV[3] is '': gateways, and the requests that these have to be woken for; and so on.
-- Retry: harmless, entries that the log has are skipped.
local OK, FENCED, CONFLICT, GAP, ENDED, MISSING = 0, 1, 2, 3, 4, 5
local HEAD, WIDTH = 7, 6
local retention, given, channels, wake_ups = ARGV[1], cjson.decode(ARGV[2]), ARGV[3], ARGV[4]
local format, sub = string.format, string.sub
local values, logs, requests -- of one partition: ARGV[2]'s values, and what the keys of logs and requests begin with

local function digest_at(id, index)
  local entry = call('XRANGE', logs .. id, (index + 1) .. '-0', (index + 1) .. '-0')[1]
  if entry then
    for field = 1, #entry[2], 2 do
      if entry[2][field] == 'd' then
        return entry[2][field + 1]
      end
    end
  end
end

-- Whether the log has the first entries of an append, as many as are known.
local function repeats(id, next_index, first, known, at)
  local is_last = first + known == next_index
  local digest = is_last and call('HGET', requests .. id, 'digest') or digest_at(id, first + known - 1)
  return digest == values[at + (known - 1) * WIDTH + 4]
end

local function write(log, req, position, at)
  local kind, choice, value, text = values[at], values[at + 1], values[at + 2], values[at + 3]
  local digest, extra = values[at + 4], values[at + 5]
  if kind == 't' then
    if extra == '' then
      call('XADD', log, position, 'c', choice, 't', value, 'x', text, 'd', digest)
    else
      call('XADD', log, position, 'c', choice, 't', value, 'x', text, 'd', digest, 'l', ARGV[extra])
    end
    return kind
  end
  if kind == 'f' then
    call('XADD', log, position, 'c', choice, 'f', value, 's', extra, 'x', text, 'd', digest)
    call('HSET', req, 'f' .. choice, value)
  elseif kind == 'p' then
    call('XADD', log, position, 'c', choice, 'p', value, 'l', ARGV[extra], 'd', digest)
  else
    call('XADD', log, position, 'end', value, 'u', text, 'm', extra, 'a', choice, 'd', digest)
  end
  call('HINCRBY', req, 'others', 1)
  return kind
end

-- Returns the outcome, the log's next index, and with OK the readers.
local function append(id, epoch, nonce, first, cached, count, at)
  local req = requests .. id
  local state = call('HMGET', req, 'state', 'epoch', 'nonce', 'next', 'readers')
  if not state[1] then
    return MISSING, 0
  end
  local next_index = tonumber(state[4])
  local known = math.min(next_index - first, count)
  if state[1] == 'finished' then
    local is_there = count > 0 and known == count and repeats(id, next_index, first, known, at)
    return is_there and OK or ENDED, next_index, ''
  end
  if state[1] ~= 'running' or state[2] ~= epoch or state[3] ~= nonce then
    return FENCED, next_index
  end
  if known < 0 then
    return GAP, next_index
  end
  if known > 0 and not repeats(id, next_index, first, known, at) then
    return CONFLICT, next_index
  end
  if cached ~= '' then
    call('HSET', req, 'cached', cached)
  end
  if known < count then
    local log, length, kind = logs .. id, nil, nil
    for j = known, count - 1 do
      length = format('%d', first + j + 1)
      kind = write(log, req, length .. '-0', at + j * WIDTH)
    end
    next_index = first + count
    local last = at + (count - 1) * WIDTH
    -- Strings, since Redis formats numbers slowly.
    call('HSET', req, 'next', length, 'digest', values[last + 4])
    if kind == 'e' then
      retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)
    end
  end
  return OK, next_index, state[5]
end

local others, woken, ends, place, bytes = {}, {}, {[-1] = 0}, 0, 0
for part = 1, #given, 2 do
  prefix, values = given[part], given[part + 1]
  logs, requests = prefix .. 'log:', prefix .. 'req:'
  local i = 1
  while values[i] do
    local first, count = values[i + 3], values[i + 5]
    local outcome, next_index, readers =
      append(values[i], values[i + 1], values[i + 2], first, values[i + 4], count, i + HEAD)
    if outcome ~= OK or next_index ~= first + count then
      others[#others + 1], others[#others + 2], others[#others + 3] = place, outcome, next_index
    end
    if outcome == OK and readers ~= '' then
      local found = woken[readers]
      if found then
        found[#found + 1] = place
      else
        woken[readers] = {place}
      end
    end
    bytes = bytes + values[i + 6]
    ends[place], place = bytes, place + 1
    i = i + HEAD + count * WIDTH
  end
end

local readers, messages = {}, {}
for names, places in pairs(woken) do
  if channels == '' then
    readers[#readers + 1], readers[#readers + 2] = names, places
  else
    local message = wake_ups
    if #places < place then
      for i, each in ipairs(places) do
        places[i] = sub(wake_ups, ends[each - 1] + 1, ends[each])
      end
      message = table.concat(places)
    end
    for gateway in string.gmatch(names, '%S+') do
      messages[gateway] = (messages[gateway] or '') .. message
    end
  end
end
for gateway, message in pairs(messages) do
  redis.pcall('PUBLISH', channels .. gateway, message) -- a lost one costs its reader a poll
end
return {others, readers}
