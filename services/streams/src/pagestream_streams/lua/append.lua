-- Appends to the logs of many requests of one partition, each fenced by (epoch, nonce) and contiguous. Retry: harmless, entries that the log
-- has already are skipped where their digest is equal.
-- ARGV: retention in ms, then for each request: id, epoch, nonce, first index, cached prompt tokens ('': unchanged), number of entries, then for
--       each entry six values: kind, choice, value, text, digest, extra:
--         't': token id, text delta, logprobs; 'f': reason, held back text, stop reason; 'e': reason, usage, error
-- Returns for each request {outcome, next index, readers}; outcomes as in records.py. The readers are told with outcome OK only.
local OK, FENCED, CONFLICT, GAP, ENDED, MISSING = 0, 1, 2, 3, 4, 5
local HEAD, WIDTH = 6, 6
local retention = ARGV[1]

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

local function write(id, req, index, at)
  local log, position, kind = prefix .. 'log:' .. id, (index + 1) .. '-0', ARGV[at]
  local choice, value, text, digest, extra = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  if kind == 't' then
    if extra == '' then
      call('XADD', log, position, 'c', choice, 't', value, 'x', text, 'd', digest)
    else
      call('XADD', log, position, 'c', choice, 't', value, 'x', text, 'd', digest, 'l', extra)
    end
  elseif kind == 'f' then
    call('XADD', log, position, 'c', choice, 'f', value, 's', extra, 'x', text, 'd', digest)
    call('HSET', req, 'f' .. choice, value)
  else
    call('XADD', log, position, 'end', value, 'u', text, 'm', extra, 'd', digest)
  end
  return kind
end

local function append(id, epoch, nonce, first, cached, count, at)
  local req = prefix .. 'req:' .. id
  local state = call('HMGET', req, 'state', 'epoch', 'nonce', 'next', 'digest', 'readers', 'ctok', 'owner')
  if not state[1] then
    return {MISSING, 0, ''}
  end
  local next_index = tonumber(state[4])
  local known = math.min(next_index - first, count)
  local function repeats()
    local digest = first + known == next_index and state[5] or digest_at(id, first + known - 1)
    return digest == ARGV[at + (known - 1) * WIDTH + 4]
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
  if known < count then
    local tokens, kind = tonumber(state[7]), nil
    for j = known, count - 1 do
      kind = write(id, req, first + j, at + j * WIDTH)
      if kind == 't' then
        tokens = tokens + 1
      end
    end
    next_index = first + count
    local last = at + (count - 1) * WIDTH
    call('HSET', req, 'next', next_index, 'digest', ARGV[last + 4], 'ctok', tokens)
    if kind == 'e' then
      retire(id, state[8], state[6], ARGV[last + 2], retention)
    end
  end
  if cached ~= '' then
    call('HSET', req, 'cached', cached)
  end
  return {OK, next_index, state[6]}
end

local out, i = {}, 2
while ARGV[i] do
  local count = tonumber(ARGV[i + 5])
  out[#out + 1] = append(ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4], count, i + HEAD)
  i = i + HEAD + count * WIDTH
end
return out
