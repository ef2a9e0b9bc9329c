-- Claims requests for an engine: takes them from the group, raises their epoch, records owner, nonce and lease, acknowledges and deletes the
-- entries. The resume queues come first, then the entry with the earliest virtual arrival: its own plus class * ageing. An engine that holds
-- nothing gets a suspect before all that, and then nothing else (docs/decisions/0024).
-- Retry: claims more; what a lost reply named is handed back by reconciliation.
-- ARGV: engine id, nonce (random), most requests, most tokens, least age of an entry in ms, ageing in ms, lease in ms, drain window in ms,
--       whether the engine holds nothing (0 | 1), its numerics fingerprint ('': unknown), how long requests that began with another one wait
--       for such an engine in ms, control time in ms, whether to take only what began with this fingerprint (0 | 1), the context that the engine
--       holds (0 or none: any). What needs a longer one waits for an engine that has it, as long as for one with its fingerprint.
-- Returns {now, whether the head of a queue is larger than what is left and has waited long enough for others to wait for it (0 | 1),
--         {id, spec, epoch, next, digest, attempts, deadline, alone (0 | 1), cached, ms that it waited in its queue}...}.
local engine, nonce, max_requests, max_tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local min_age, ageing, lease, window = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local idle, fingerprint, patience, control = ARGV[9] == '1', ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
local context = tonumber(ARGV[14] or 0)
local meta, now, drained = prefix .. 'meta', now_ms(), 0
local claims, HEAD = {now, 0}, 2
local drained_tokens = 0

local function own(id, alone, since)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'state', 'spec', 'next', 'digest', 'deadline', 'print', 'cached')
  if found[1] ~= 'queued' then
    return false
  end
  local epoch, attempts = call('HINCRBY', req, 'epoch', 1), call('HINCRBY', req, 'attempts', 1)
  call('HSET', req, 'state', 'running', 'owner', engine, 'nonce', nonce, 'from', found[3], 'step', '', 'alone', alone,
    'print', fingerprint ~= '' and fingerprint or found[6] or '')
  call('HDEL', req, 'queue', 'entry')
  call('SADD', prefix .. 'owned:' .. engine, id)
  claims[#claims + 1] = {id, found[2], epoch, found[3], found[4], attempts, found[5], alone == '1' and 1 or 0, found[7],
    math.max(0, now - since)}
  return true
end

local function is_mine(print, since)
  return print == '' or fingerprint == '' or print == fingerprint or age(since, now) >= patience
end

local function claim_suspect()
  local id, since = first_suspect(fingerprint, patience, now)
  while id do
    call('ZREM', prefix .. 'suspects', id)
    if own(id, '1', since) then
      return true
    end
    id, since = first_suspect(fingerprint, patience, now)
  end
  return false
end

local function head(name)
  local first = call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', 1)[1]
  if first then
    local arrival = tonumber(string.match(first[1], '^%d+'))
    local fits = context == 0 or tonumber(call('HGET', prefix .. 'req:' .. first[2][2], 'context') or 0) <= context
    return {name = name, arrival = arrival, tokens = tonumber(first[2][4]), fits = fits or age(arrival, now) >= patience}
  end
end

local known = call('HMGET', meta, 'classes', 'prints')
local heads, resumes = {}, {}
for class in string.gmatch(known[1] or '', '%d+') do
  heads[class] = head(class)
end
resumes.resume = head('resume')
local prints = ' '
for print in string.gmatch(known[2] or '', '%S+') do
  local name = 'resume:' .. print
  resumes[name] = head(name)
  if resumes[name] then
    prints, resumes[name].print = prints .. print .. ' ', print
  else
    call('DEL', prefix .. 'queue:' .. name)
  end
end
if known[2] and known[2] ~= prints then
  call('HSET', meta, 'prints', prints)
end
if ARGV[13] == '1' then
  local name = 'resume:' .. fingerprint
  heads, resumes = {}, {[name] = resumes[name]}
end

local function choose()
  local best
  for _, candidate in pairs(resumes) do
    if candidate.fits and age(candidate.arrival, now) >= min_age and is_mine(candidate.print or '', candidate.arrival)
      and (not best or candidate.arrival < best.arrival) then
      best = candidate
    end
  end
  if best then
    return best
  end
  local least
  for class, candidate in pairs(heads) do
    local virtual = candidate.arrival + class * ageing
    if candidate.fits and age(candidate.arrival, now) >= min_age and (not best or virtual < least or virtual == least and tonumber(class) < tonumber(best.name)) then
      best, least = candidate, virtual
    end
  end
  return best
end

local function take(name)
  -- The entry is acknowledged below: one consumer for all engines, or the dead ones' would pile up.
  local queue = prefix .. 'queue:' .. name
  local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', 1, 'STREAMS', queue, '>')
  if read and read.err then
    ensure_group(queue)
    read = call('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', 1, 'STREAMS', queue, '>')
  end
  -- An entry that the group was given by hand is a head like any other: its request's state tells whether it still waits.
  local entry = read and read[1][2][1] or call('XRANGE', queue, '-', '+', 'COUNT', 1)[1]
  call('XACK', queue, GROUP, entry[1])
  call('XDEL', queue, entry[1])
  uncount(entry[2][2], name, entry[2][4])
  return entry[2][2]
end

local alone = idle and max_requests > 0 and call('ZCARD', prefix .. 'suspects') > 0 and control_is_over(now, control) and claim_suspect()
while not alone and #claims - HEAD < max_requests do
  local best = choose()
  if not best then
    break
  end
  if best.tokens > max_tokens then
    claims[2] = (resumes[best.name] or age(best.arrival, now) >= ageing) and 1 or 0
    break
  end
  local id = take(best.name)
  if resumes[best.name] then
    resumes[best.name] = head(best.name)
    if resumes[best.name] then
      resumes[best.name].print = best.print
    end
  else
    heads[best.name] = head(best.name)
    drained, drained_tokens = drained + 1, drained_tokens + best.tokens
  end
  if own(id, '', best.arrival) then
    max_tokens = max_tokens - best.tokens
  end
end
if #claims > HEAD then
  call('ZADD', prefix .. 'leases', now + lease, engine)
end
if drained > 0 then
  local from, before, tokens = unpack(call('HMGET', meta, 'drain_from', 'drained', 'drained_tokens'))
  local span = from and now - from or 0
  if not from or span > 2 * window then
    from, before, tokens = now, 0, 0
  elseif span > window then
    -- Halving count and span together keeps the rate and forgets the past.
    from, before, tokens = now - math.floor(span / 2), math.floor(before / 2), math.floor((tokens or 0) / 2)
  end
  call('HSET', meta, 'drain_from', from, 'drained', before + drained, 'drained_tokens', (tokens or 0) + drained_tokens)
end
return claims
