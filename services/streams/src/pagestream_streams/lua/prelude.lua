-- Prepended to every script. KEYS[1] is the prefix of one partition's keys, "ps:{<model>/<partition>}:"; every other key is made from it, so
-- that all keys of a script carry the same hash tag. All times are milliseconds of Redis' own clock.
local call, prefix = redis.call, KEYS[1]
local GROUP = 'engines'

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- How long something has waited. A clock that was set back must not let it wait until it has caught up.
local function age(since, now)
  return now < tonumber(since) and math.huge or now - since
end

-- A first write that needs no memory lets a script's others through when Redis is full: what keeps time going, or frees something, must run then.
local function although_full()
  call('ZREM', prefix .. 'graces', '')
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

-- What each tenant has queued of a class: hash tenants:<class>, fields r<tenant> (requests), t<tenant> (prompt tokens) and w<tenant> (weight).
-- The weights of all that wait are summed up in the field "weights:<class>" of meta.
local function charge(class, tenant, tokens, weight)
  local key = prefix .. 'tenants:' .. class
  if call('HINCRBY', key, 'r' .. tenant, 1) == 1 then
    call('HSET', key, 'w' .. tenant, weight)
    call('HINCRBY', prefix .. 'meta', 'weights:' .. class, weight)
  end
  call('HINCRBY', key, 't' .. tenant, tokens)
end

-- Queue names that don't begin with "resume" are classes: what leaves them no longer counts for their bounds.
local function uncount(id, class, tokens)
  if string.sub(class, 1, 6) == 'resume' then
    return
  end
  local key, meta, tenant = prefix .. 'tenants:' .. class, prefix .. 'meta', call('HGET', prefix .. 'req:' .. id, 'tenant')
  call('HINCRBY', meta, 'tokens:' .. class, -tokens)
  if tenant and call('HINCRBY', key, 'r' .. tenant, -1) <= 0 then
    call('HINCRBY', meta, 'weights:' .. class, -(call('HGET', key, 'w' .. tenant) or 0))
    call('HDEL', key, 'r' .. tenant, 't' .. tenant, 'w' .. tenant)
  elseif tenant then
    call('HINCRBY', key, 't' .. tenant, -tokens)
  end
end

local function disown(id, engine)
  call('SREM', prefix .. 'owned:' .. engine, id)
end

-- What was begun waits in a queue for engines that compute as the one that began it did: resume:<fingerprint>. The fingerprints that have one
-- are the words of the field "prints" of meta.
local function resume_queue(fingerprint)
  if fingerprint == '' then
    return 'resume'
  end
  local meta = prefix .. 'meta'
  local prints = call('HGET', meta, 'prints') or ' '
  if not string.find(prints, ' ' .. fingerprint .. ' ', 1, true) then
    call('HSET', meta, 'prints', prints .. fingerprint .. ' ')
  end
  return 'resume:' .. fingerprint
end

-- Of the entries in a log "others" are no tokens: finishes and the end. So its tokens are next - others.

local function words(text)
  local _, count = string.gsub(text, '%S+', '')
  return count
end

-- Poison, see docs/decisions/0024. Of a request: died_at is the index at which engines died with it in the running step, died_on their ids,
-- died_alone those that ran nothing else, died_first when the first one died, or when it was acquitted last; died_near are engines that died with
-- it outside the step.
local SUSPECT, CONDEMNED, MOST_NAMED = 2, 2, 16

-- Puts a running request back, before all that were never claimed; a suspect to those that are run alone. The empty nonce fences its former
-- owner.
local function requeue(id, engine, not_before)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'ptok', 'others', 'next', 'print', 'died_at', 'died_on')
  call('HSET', req, 'state', 'queued', 'owner', '', 'nonce', '')
  if found[5] == found[3] and words(found[6]) >= SUSPECT then
    call('ZADD', prefix .. 'suspects', not_before or now_ms(), id)
  else
    local began = tonumber(found[3]) > 0
    enqueue(id, resume_queue(began and found[4] or ''), found[1] + found[3] - found[2])
  end
  disown(id, engine)
end

-- Between two runs of suspects engines run everything else for a while: in a storm they die then, too. It counts only while an engine lives.
local function control_is_over(now, control)
  local found = call('HMGET', prefix .. 'meta', 'up', 'alone_died')
  return found[1] and (not found[2] or age(math.max(found[1], found[2]), now) >= control)
end

local function named(engines, engine)
  if words(engines) >= MOST_NAMED then
    engines = string.gsub(engines, '^%S+ ', '')
  end
  return engines .. engine .. ' '
end

-- Puts back a request whose engine has died. The death counts where the request was in the running step: its engine said so, or had appended
-- to it and not said otherwise. Returns whether it counted.
local function requeue_after_death(id, engine, now, control)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'next', 'from', 'step', 'alone', 'died_at', 'died_on', 'died_alone', 'died_near')
  local same = found[1] == found[5]
  local on, alone = same and found[6] or '', same and found[7] or ''
  if found[3] ~= '1' and (found[3] == '0' or tonumber(found[1]) <= tonumber(found[2] or found[1])) then
    call('HSET', req, 'died_near', named(found[8] or '', engine))
    requeue(id, engine)
    return false
  end
  if on == '' then
    call('HSET', req, 'died_first', now)
  end
  on = named(on, engine)
  if found[4] == '1' and found[1] == found[2] then
    alone = alone .. engine .. ' '
  end
  call('HSET', req, 'died_at', found[1], 'died_on', on, 'died_alone', alone)
  if words(alone) >= CONDEMNED then
    call('HSET', req, 'state', 'queued', 'owner', '', 'nonce', '')
    call('ZADD', prefix .. 'verdicts', now + control, id)
    disown(id, engine)
  else
    requeue(id, engine, alone ~= '' and now + control or now)
  end
  return true
end

-- Notes an engine's death once. That of an engine which ran a suspect alone is explained by it ("!"); any other tells that engines die without
-- the suspects.
local KEPT_DEATHS_MS = 3600000
local function note_death(engine, now)
  local deaths, meta, alone = prefix .. 'deaths', prefix .. 'meta', prefix .. 'alone'
  if call('ZSCORE', deaths, engine) or call('ZSCORE', deaths, '!' .. engine) then
    return
  end
  call('ZREMRANGEBYSCORE', deaths, '-inf', now - KEPT_DEATHS_MS)
  if call('HDEL', alone, engine) == 1 then
    call('ZADD', deaths, now, '!' .. engine)
    call('HSET', meta, 'alone_died', now)
  else
    call('ZADD', deaths, now, engine)
  end
end

-- The suspect that has waited longest, of those that this engine may run: one that has tokens goes on where they are computed alike, for as long
-- as `patience`. Returns its id and since when it waits, or nothing.
local function first_suspect(fingerprint, patience, now)
  for _, id in ipairs(call('ZRANGEBYSCORE', prefix .. 'suspects', '-inf', now, 'LIMIT', 0, 16)) do
    local found, since = call('HMGET', prefix .. 'req:' .. id, 'print', 'next'), tonumber(call('ZSCORE', prefix .. 'suspects', id))
    local print = found[2] and found[2] ~= '0' and found[1] or ''
    if print == '' or fingerprint == '' or print == fingerprint or age(since, now) >= patience then
      return id, since
    end
  end
end

local function drop_lease(engine, now)
  call('ZREM', prefix .. 'leases', engine)
  if call('ZCOUNT', prefix .. 'leases', now, '+inf') == 0 then
    call('HDEL', prefix .. 'meta', 'up')
  end
end

-- Whether engines died that did not have a request, since its own first one did or in the window before now, whichever is longer.
local function storms(had_it, died_first, now, window)
  for _, engine in ipairs(call('ZRANGEBYSCORE', prefix .. 'deaths', math.min(died_first, now - window), '+inf')) do
    if string.sub(engine, 1, 1) ~= '!' and not string.find(' ' .. had_it, ' ' .. engine .. ' ', 1, true) then
      return true
    end
  end
  return false
end

-- "silent" is until when a client of the request may not have noticed that its gateway died. More than minutes ahead is a clock that was set back.
local MOST_SILENT_MS = 600000
local function starts_grace(id, now)
  local policy = call('HMGET', prefix .. 'req:' .. id, 'state', 'continue', 'grace', 'silent')
  if policy[1] and policy[1] ~= 'finished' and policy[2] == '0' then
    local silent = tonumber(policy[4] or 0)
    local from = silent <= now + MOST_SILENT_MS and math.max(now, silent) or now
    call('ZADD', prefix .. 'graces', from + policy[3], id)
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

-- Where it was the last one, the grace starts.
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
