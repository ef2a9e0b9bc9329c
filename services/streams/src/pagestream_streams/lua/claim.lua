-- Claim requests for an engine: take them from their queues, raise their epochs, record owner, nonce and lease.
--
-- The queues of begun requests ("resume") come first; then the entry with the earliest virtual arrival, which is its
-- arrival plus class * ageing. An engine that holds nothing gets a suspect before all that, and then nothing else
-- (docs/decisions/0024). A request that needs a longer context than the engine holds is left for ARGV[11].
-- Run by: engine/claiming.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id, [2] nonce (random), [3] most requests, [4] most tokens
--       [5] least age of an entry in ms, [6] ageing in ms, [7] lease in ms, [8] drain window in ms
--       [9] whether the engine holds nothing (0 | 1)
--       [10] the engine's fingerprint ('': unknown)
--       [11] how long begun requests wait for an engine with their fingerprint, in ms
--       [12] control time in ms (see prelude.lua)
--       [13] whether to take only requests begun with this fingerprint (0 | 1)
--       [14] the context that the engine holds (0 or none: any)
-- Returns: {now, whether a queue's head is too large for what is left and has waited so long that others must not
--          overtake it (0 | 1), {id, spec, epoch, next index, digest, attempts, deadline, isolated (0 | 1), cached
--          tokens, ms in its queue}...}.
-- Retry: claims more. Requests of a lost reply are owned by the engine, whose heartbeats hand them back.
local engine, nonce, max_requests, max_tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local min_age, ageing, lease, window = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local idle, fingerprint, patience, control = ARGV[9] == '1', ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
local context = tonumber(ARGV[14] or 0)
local meta, now, drained = prefix .. 'meta', now_ms(), 0
local claims, HEAD = {now, 0}, 2
local drained_tokens, drained_longest, drained_of = 0, 0, {}

-- Makes a queued request this engine's; false where it is not queued any more.
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
  claims[#claims + 1] = {id, found[2], epoch, found[3], found[4], attempts, found[5], alone == '1' and 1 or 0,
    found[7], math.max(0, now - since)}
  return true
end

-- Whether a begun request may go on here: its fingerprint matches, or it has waited long enough for one that does.
local function is_mine(print, since)
  return print == '' or fingerprint == '' or print == fingerprint or age(since, now) >= patience
end

local function claim_suspect()
  local id, since = first_suspect(fingerprint, context, patience, now)
  while id do
    call('ZREM', prefix .. 'suspects', id)
    if own(id, '1', since) then
      return true
    end
    id, since = first_suspect(fingerprint, context, patience, now)
  end
  return false
end

-- The first entry of a queue, or nothing.
local function head(name)
  local first = call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', 1)[1]
  if first then
    local arrival = tonumber(string.match(first[1], '^%d+'))
    local fits = context == 0 or tonumber(call('HGET', prefix .. 'req:' .. first[2][2], 'context') or 0) <= context
    fits = fits or age(arrival, now) >= patience
    return {name = name, arrival = arrival, tokens = tonumber(first[2][4]), fits = fits}
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

-- The queue's head to claim next, or nothing.
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
    local is_earlier = not best or virtual < least or virtual == least and tonumber(class) < tonumber(best.name)
    if candidate.fits and age(candidate.arrival, now) >= min_age and is_earlier then
      best, least = candidate, virtual
    end
  end
  return best
end

-- Removes the head of a queue; returns its request id.
local function take(name)
  -- One consumer for all engines, or those of dead engines would pile up. The entry is acknowledged below.
  local queue = prefix .. 'queue:' .. name
  local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', 1, 'STREAMS', queue, '>')
  if read and read.err then
    ensure_group(queue)
    read = call('XREADGROUP', 'GROUP', GROUP, GROUP, 'COUNT', 1, 'STREAMS', queue, '>')
  end
  -- Without an unread entry the head is one that was delivered by hand; its request's state says whether it waits.
  local entry = read and read[1][2][1] or call('XRANGE', queue, '-', '+', 'COUNT', 1)[1]
  call('XACK', queue, GROUP, entry[1])
  call('XDEL', queue, entry[1])
  uncount(entry[2][2], name, entry[2][4])
  return entry[2][2]
end

local alone = idle and max_requests > 0 and call('ZCARD', prefix .. 'suspects') > 0
  and control_is_over(now, control) and claim_suspect()
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
    drained_longest = math.max(drained_longest, best.tokens)
    drained_of[best.name] = (drained_of[best.name] or 0) + best.tokens
  end
  if own(id, '', best.arrival) then
    max_tokens = max_tokens - best.tokens
  end
end
if #claims > HEAD then
  call('ZADD', prefix .. 'leases', now + lease, engine)
end
if drained > 0 then
  local from, before, tokens, longest = unpack(call('HMGET', meta, 'drain_from', 'drained', 'drained_tokens',
    'drained_longest'))
  local span, kept = from and now - from or 0, 1
  if not from or span > 2 * window then
    from, kept = now, 0
  elseif span > window then
    -- Halving both keeps the rate, and lets the past count less.
    from, kept = now - math.floor(span / 2), 0.5
  end
  local function past(value)
    return math.floor((value or 0) * kept)
  end
  call('HSET', meta, 'drain_from', from, 'drained', past(before) + drained, 'drained_tokens',
    past(tokens) + drained_tokens, 'drained_longest', math.max(past(longest), drained_longest))
  for class in string.gmatch(known[1] or '', '%d+') do
    local field = 'drained_tokens:' .. class
    local tokens_of = past(call('HGET', meta, field)) + (drained_of[class] or 0)
    if kept < 1 or drained_of[class] then
      call('HSET', meta, field, tokens_of)
    end
  end
end
return claims
