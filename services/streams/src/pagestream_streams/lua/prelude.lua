-- Prepended to every script. KEYS[1] is the prefix of one partition's keys, "ps:{<model>/<partition>}:"; every other key is made from it, so
-- that all keys of a script carry the same hash tag. All times are milliseconds of Redis' own clock.
local call, prefix = redis.call, KEYS[1]
local GROUP = 'engines'

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function chain(digest, body)
  return string.sub(redis.sha1hex(digest .. ':' .. body), 1, 16)
end

local function ensure_group(queue)
  local made = redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    error(made.err)
  end
end

-- Appends a request to a queue and remembers where, so that it can be taken out again.
local function enqueue(id, name, tokens)
  local queue = prefix .. 'queue:' .. name
  if call('XLEN', queue) == 0 then
    ensure_group(queue)
  end
  local entry = call('XADD', queue, '*', 'id', id, 't', tokens)
  call('HSET', prefix .. 'req:' .. id, 'queue', name, 'entry', entry)
end

-- Queue names other than "resume" are classes, whose prompt tokens are counted for their bound.
local function uncount(name, tokens)
  if name ~= 'resume' then
    call('HINCRBY', prefix .. 'meta', 'tokens:' .. name, -tokens)
  end
end

local function disown(id, engine)
  call('SREM', prefix .. 'owned:' .. engine, id)
  if call('EXISTS', prefix .. 'owned:' .. engine) == 0 then
    call('ZREM', prefix .. 'leases', engine)
  end
end

-- Puts a running request back, before all that were never claimed. The empty nonce fences its former owner.
local function requeue(id, engine)
  local req = prefix .. 'req:' .. id
  local size = call('HMGET', req, 'ptok', 'ctok')
  call('HSET', req, 'state', 'queued', 'owner', '', 'nonce', '')
  enqueue(id, 'resume', size[1] + size[2])
  disown(id, engine)
end

local function starts_grace(id, now)
  local policy = call('HMGET', prefix .. 'req:' .. id, 'state', 'continue', 'grace')
  if policy[1] and policy[1] ~= 'finished' and policy[2] == '0' then
    call('ZADD', prefix .. 'graces', now + policy[3], id)
  end
end

-- The readers of a request are a string of gateway ids, each followed by a space.
local function has_reader(readers, gateway)
  return string.find(' ' .. readers, ' ' .. gateway .. ' ', 1, true) ~= nil
end

local function add_reader(id, readers, gateway)
  if not has_reader(readers, gateway) then
    call('HSET', prefix .. 'req:' .. id, 'readers', readers .. gateway .. ' ')
  end
  call('SADD', prefix .. 'reads:' .. gateway, id)
  call('ZREM', prefix .. 'graces', id)
end

local function remove_reader(id, gateway, now)
  local req = prefix .. 'req:' .. id
  call('SREM', prefix .. 'reads:' .. gateway, id)
  local readers = call('HGET', req, 'readers')
  if not readers or not has_reader(readers, gateway) then
    return
  end
  local rest = ''
  for other in string.gmatch(readers, '%S+') do
    if other ~= gateway then
      rest = rest .. other .. ' '
    end
  end
  call('HSET', req, 'readers', rest)
  if rest == '' then
    starts_grace(id, now)
  end
end

-- What every end of a request does, whoever writes it.
local function retire(id, owner, readers, reason, retention)
  local req = prefix .. 'req:' .. id
  call('HSET', req, 'state', 'finished', 'reason', reason, 'ended', now_ms(), 'owner', '', 'readers', '')
  call('ZREM', prefix .. 'deadlines', id)
  call('ZREM', prefix .. 'graces', id)
  if owner ~= '' then
    disown(id, owner)
  end
  for gateway in string.gmatch(readers, '%S+') do
    call('SREM', prefix .. 'reads:' .. gateway, id)
  end
  call('PEXPIRE', req, retention)
  call('PEXPIRE', prefix .. 'log:' .. id, retention)
end
