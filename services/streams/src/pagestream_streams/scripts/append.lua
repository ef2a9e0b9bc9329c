-- Append entries to the logs of many requests of one partition.
--
-- Each append is fenced by the claim's epoch and nonce, and has to continue its log. Entries that the log has already
-- are compared by digest and skipped.
-- Run by: engine/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] retention in ms
--       [2] a JSON array, since one of its values costs less than one argument of a command. For each request: id,
--           epoch (a string), nonce, first index, cached prompt tokens ('': unchanged), number of entries, wake-up;
--           then six values for each entry, numbers as strings: kind, choice, value, text, digest, extra
--             kind 't': value is the token id, text its text, extra its logprobs
--             kind 'f': value is the reason, text the text held back, extra the stop reason
--             kind 'e': choice is the second of the end ('': unknown), value the reason, text the usage, extra the error
--             kind 'p': value is how far the parts of the prompt go, extra the part
--           Logprobs, parts and wake-ups are bytes, which JSON can't hold: '' for none, else their index in ARGV.
--       [3] prefix of the gateways' channels; given wake-ups are published here, one message for each gateway
--       [4...] the bytes
-- Returns: for each request {outcome, next index, readers}. Outcomes are AppendKind in records.py. The readers, with
--          outcome OK only, are the gateways that the caller has to wake.
-- Retry: harmless, entries that the log has are skipped.
local OK, FENCED, CONFLICT, GAP, ENDED, MISSING = 0, 1, 2, 3, 4, 5
local HEAD, WIDTH = 7, 6
local retention, values, format = ARGV[1], cjson.decode(ARGV[2]), string.format

local function digest_at(id, index)
  local entry = call('XRANGE', prefix .. 'log:' .. id, (index + 1) .. '-0', (index + 1) .. '-0')[1]
  if entry then
    for field = 1, #entry[2], 2 do
      if entry[2][field] == 'd' then
        return entry[2][field + 1]
      end
    end
  end
end

local function write(id, req, position, at)
  local log, kind = prefix .. 'log:' .. id, values[at]
  local choice, value, text = values[at + 1], values[at + 2], values[at + 3]
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

local function append(id, epoch, nonce, first, cached, count, at)
  local req = prefix .. 'req:' .. id
  local state = call('HMGET', req, 'state', 'epoch', 'nonce', 'next', 'readers')
  if not state[1] then
    return {MISSING, 0, ''}
  end
  local next_index = tonumber(state[4])
  local known = math.min(next_index - first, count)
  local function repeats()
    local digest = first + known == next_index and call('HGET', req, 'digest') or digest_at(id, first + known - 1)
    return digest == values[at + (known - 1) * WIDTH + 4]
  end
  if state[1] == 'finished' then
    return {count > 0 and known == count and repeats() and OK or ENDED, next_index, ''}
  end
  if state[1] ~= 'running' or state[2] ~= epoch or state[3] ~= nonce then
    return {FENCED, next_index, ''}
  end
  if known < 0 then
    return {GAP, next_index, ''}
  end
  if known > 0 and not repeats() then
    return {CONFLICT, next_index, ''}
  end
  if cached ~= '' then
    call('HSET', req, 'cached', cached)
  end
  if known < count then
    local length, kind
    for j = known, count - 1 do
      length = format('%d', first + j + 1)
      kind = write(id, req, length .. '-0', at + j * WIDTH)
    end
    next_index = first + count
    local last = at + (count - 1) * WIDTH
    -- Strings, since Redis formats numbers slowly.
    call('HSET', req, 'next', length, 'digest', values[last + 4])
    if kind == 'e' then
      retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)
    end
  end
  return {OK, next_index, state[5]}
end

local wake_ups = {}

local function wake(reply, place)
  if reply[1] == OK and place ~= '' then
    for gateway in string.gmatch(reply[3] or '', '%S+') do
      local message = wake_ups[gateway] or {}
      message[#message + 1], wake_ups[gateway] = ARGV[place], message
    end
    reply[3] = ''
  end
  return reply
end

local out, i = {}, 1
while values[i] do
  local count = values[i + 5]
  local reply = append(values[i], values[i + 1], values[i + 2], values[i + 3], values[i + 4], count, i + HEAD)
  out[#out + 1] = wake(reply, values[i + 6])
  i = i + HEAD + count * WIDTH
end
for gateway, message in pairs(wake_ups) do
  redis.pcall('PUBLISH', ARGV[3] .. gateway, table.concat(message)) -- a lost one costs its reader a poll
end
return out
