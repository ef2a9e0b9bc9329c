-- Claims requests for an engine: takes them from the group, raises their epoch, records owner, nonce and lease, acknowledges and deletes the
-- entries. The resume queue comes first, then the entry with the earliest virtual arrival: its own plus class * ageing.
-- Retry: claims more; what a lost reply named is handed back by reconciliation.
-- ARGV: engine id, nonce (random), most requests, most tokens, least age of an entry in ms, ageing in ms, lease in ms, drain window in ms
-- Returns {now, {id, spec, epoch, next, digest, attempts, deadline}...}.
local engine, nonce, max_requests, max_tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local min_age, ageing, lease, window = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local meta, now, claims, drained = prefix .. 'meta', now_ms(), {}, 0
claims[1] = now

local function head(name)
  local first = call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', 1)[1]
  if first then
    return {name = name, arrival = tonumber(string.match(first[1], '^%d+')), tokens = tonumber(first[2][4])}
  end
end

local heads = {}
for class in string.gmatch(call('HGET', meta, 'classes') or '', '%d+') do
  heads[class] = head(class)
end

local function choose()
  local best = head('resume')
  if best and now - best.arrival >= min_age then
    return best
  end
  best = nil
  local least
  for class, candidate in pairs(heads) do
    local virtual = candidate.arrival + class * ageing
    if now - candidate.arrival >= min_age and (not best or virtual < least or virtual == least and tonumber(class) < tonumber(best.name)) then
      best, least = candidate, virtual
    end
  end
  return best
end

local function take(name)
  local queue = prefix .. 'queue:' .. name
  local read = redis.pcall('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', 1, 'STREAMS', queue, '>')
  if read and read.err then
    ensure_group(queue)
    read = call('XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', 1, 'STREAMS', queue, '>')
  end
  local entry = read and read[1][2][1]
  if entry then
    call('XACK', queue, GROUP, entry[1])
    call('XDEL', queue, entry[1])
    uncount(name, entry[2][4])
    return entry[2][2]
  end
end

while #claims <= max_requests do
  local best = choose()
  if not best or best.tokens > max_tokens then
    break
  end
  local id = take(best.name)
  if best.name ~= 'resume' then
    heads[best.name] = head(best.name)
    drained = drained + 1
  end
  local req = prefix .. 'req:' .. (id or '')
  if id and call('HGET', req, 'state') == 'queued' then
    max_tokens = max_tokens - best.tokens
    local epoch, attempts = call('HINCRBY', req, 'epoch', 1), call('HINCRBY', req, 'attempts', 1)
    call('HSET', req, 'state', 'running', 'owner', engine, 'nonce', nonce)
    call('HDEL', req, 'queue', 'entry')
    call('SADD', prefix .. 'owned:' .. engine, id)
    local found = call('HMGET', req, 'spec', 'next', 'digest', 'deadline')
    claims[#claims + 1] = {id, found[1], epoch, found[2], found[3], attempts, found[4]}
  end
end
if #claims > 1 then
  call('ZADD', prefix .. 'leases', now + lease, engine)
end
if drained > 0 then
  local from, before = unpack(call('HMGET', meta, 'drain_from', 'drained'))
  local span = from and now - from or 0
  if not from or span > 2 * window then
    from, before = now, 0
  elseif span > window then
    -- Halving count and span together keeps the rate and forgets the past.
    from, before = now - math.floor(span / 2), math.floor(before / 2)
  end
  call('HSET', meta, 'drain_from', from, 'drained', before + drained)
end
return claims
