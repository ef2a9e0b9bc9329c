-- Helpers that are prepended to every script.
--
-- KEYS[1] is the prefix of one partition's keys, "<key prefix>:{<model>/<partition>}:". Every key is made from it, so
-- that all keys of a script carry the same hash tag. KEYS[2] is never a key: it is there for clusters, see Connection
-- in connection.py. All times are milliseconds of Redis' own clock.

-- == Time, memory, digests ==

local call, prefix = redis.call, KEYS[1]
local GROUP = 'engines' -- the consumer group of every queue

-- What a run over many partitions remembers from one to the next.
local run = {moved = 0}

-- Runs a step for the partition of KEYS[1], and for those whose prefixes are ARGV[first] and the following: a server
-- that is no cluster has the keys of all. Returns their replies; where a step fails its error is its reply.
local function on_each_partition(first, step)
  local replies = {}
  local function on(place)
    prefix = place
    local is_done, reply = pcall(step)
    if not is_done and type(reply) ~= 'table' then
      reply = redis.error_reply(string.match(reply, '%-(%u+ .*)$') or 'ERR ' .. reply) -- servers before 7.0
    end
    replies[#replies + 1] = is_done and reply or {err = reply.err}
  end
  on(prefix)
  for i = first, #ARGV do
    on(ARGV[i])
  end
  return replies
end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- How long something has waited; for ever where the clock was set back, so that it need not catch up first.
local function age(since, now)
  return now < tonumber(since) and math.huge or now - since
end

-- Lets a script's later writes through when Redis is full, by a first write that needs no memory. For scripts that
-- renew leases, register readers or free memory.
local function although_full()
  call('ZREM', prefix .. 'graces', '')
end

-- The digest of a log that is extended by an entry, as digests.py computes it.
local function chain(digest, body)
  return string.sub(redis.sha1hex(digest .. ':' .. body), 1, 16)
end

-- == Queues and their bounds ==

local function ensure_group(queue)
  local made = redis.pcall('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    error(made.err)
  end
end

-- Appends a request to a queue, and records the entry in the request so that it can be taken out. `context` and `left`
-- are what claims would otherwise read from the record of each entry that they pass over: the context that it needs,
-- and for how many ms other engines leave it longer (none: not known, and 0).
local function enqueue(id, name, tokens, context, left)
  local queue = prefix .. 'queue:' .. name
  if call('XLEN', queue) == 0 then
    ensure_group(queue)
  end
  local entry = call('XADD', queue, '*', 'id', id, 't', tokens, unpack(context and {'c', context, 'l', left} or {}))
  call('HSET', prefix .. 'req:' .. id, 'queue', name, 'entry', entry)
  return entry
end

-- Orders the entries of all queues and partitions: the smaller key is claimed first. Begun requests come before all
-- others, in the order in which they were requeued; the others by their virtual arrival (docs/design/queueing.md),
-- or by their rank and class under a policy that ranks them (docs/design/queueing.md).
local BEGUN = 10000000000000 -- 317 years in ms
local function order_key(queue, arrival, ageing)
  local class = tonumber(queue)
  return class and arrival + class * ageing or arrival - BEGUN
end

-- The field "policy" of meta names the engines' policy. Under one of these the sorted set ranks:<class> has each entry
-- of that class' queue by its rank; under all others an entry's rank is its arrival.
local RANKED = {shortest_first = true, fair = true}

-- The rank by expected work: the arrival, later by TOKEN_MS for each token and at most by `most`, all in ms.
local TOKEN_MS = 10
local function rank_by_work(entry, tokens, most)
  return tonumber(string.match(entry, '^%d+')) + math.min(math.ceil(tokens * TOKEN_MS), most)
end

-- For how long claims have been counted in the drain rate, in ms; nothing where none was, or where that lies ahead of
-- the clock, which was set back.
local function drain_span(from, now)
  from = from and tonumber(from)
  return from and from <= now and now - from or nil
end

-- Counts a queued request for its tenant. The hash tenants:<class> has the fields r<tenant> (requests), t<tenant>
-- (prompt tokens) and w<tenant> (weight); the field "weights:<class>" of meta is the sum of the weights of tenants
-- that wait.
local function charge(class, tenant, tokens, weight)
  local key = prefix .. 'tenants:' .. class
  if call('HINCRBY', key, 'r' .. tenant, 1) == 1 then
    call('HSET', key, 'w' .. tenant, weight)
    call('HINCRBY', prefix .. 'meta', 'weights:' .. class, weight)
  end
  call('HINCRBY', key, 't' .. tenant, tokens)
end

-- Takes a request that leaves a queue out of the bounds. Only classes have bounds: the queues not named "resume...".
local function uncount(id, class, tokens)
  if string.sub(class, 1, 6) == 'resume' then
    return
  end
  local key, meta = prefix .. 'tenants:' .. class, prefix .. 'meta'
  local tenant, expected = unpack(call('HMGET', prefix .. 'req:' .. id, 'tenant', 'expected'))
  call('HINCRBY', meta, 'tokens:' .. class, -tokens)
  if expected and expected ~= '0' and call('HINCRBY', meta, 'outputs:' .. class, -expected) < 0 then
    call('HSET', meta, 'outputs:' .. class, 0)
  end
  if tenant and call('HINCRBY', key, 'r' .. tenant, -1) <= 0 then
    call('HINCRBY', meta, 'weights:' .. class, -(call('HGET', key, 'w' .. tenant) or 0))
    call('HDEL', key, 'r' .. tenant, 't' .. tenant, 'w' .. tenant)
  elseif tenant then
    call('HINCRBY', key, 't' .. tenant, -tokens)
  end
end

-- Removes a request from those that an engine owns.
local function disown(id, engine)
  call('SREM', prefix .. 'owned:' .. engine, id)
end

-- The queue of begun requests with a fingerprint: resume:<fingerprint>, for engines that compute as the last one did.
-- The field "prints" of meta has the fingerprints with such a queue, separated by spaces.
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

-- The request's field "others" counts the log entries that are no tokens (finishes and the end), so that the number of
-- its tokens is next - others.

-- == Poisonous requests, see docs/design/fencing.md ==
--
-- Fields of a request: died_at is the index at which engines died with it in their running step, died_on their ids,
-- died_alone those that ran nothing else, died_first when the first one died, or when it was last acquitted; died_near
-- are engines that died with it outside the step. Engine ids are each followed by a space.

local function words(text)
  local _, count = string.gsub(text, '%S+', '')
  return count
end

-- Deaths that make a suspect; isolated deaths that condemn it; most ids in a list.
local SUSPECT, CONDEMNED, MOST_NAMED = 2, 2, 16

-- Requeues a running request, before all that were never claimed; a suspect among those that run isolated: one with
-- several deaths, or with one in a step that did not end and that it was new in. The empty nonce fences its former
-- owner.
local function requeue(id, engine, not_before)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'ptok', 'others', 'next', 'print', 'died_at', 'died_on', 'stalled')
  call('HSET', req, 'state', 'queued', 'owner', '', 'nonce', '')
  if found[5] == found[3] and (words(found[6]) >= SUSPECT or found[7] and words(found[6]) > 0) then
    call('ZADD', prefix .. 'suspects', not_before or now_ms(), id)
  else
    local began = tonumber(found[3]) > 0
    enqueue(id, resume_queue(began and found[4] or ''), found[1] + found[3] - found[2])
  end
  disown(id, engine)
end

-- Whether the control time since the last isolated death is over. In it engines run without suspects: in a storm of
-- other failures they die then, too. It counts only while an engine lives.
local function control_is_over(now, control)
  local found = call('HMGET', prefix .. 'meta', 'up', 'alone_died')
  return found[1] and (not found[2] or age(math.max(found[1], found[2]), now) >= control)
end

-- Adds an engine id to a list; beyond MOST_NAMED the oldest goes.
local function named(engines, engine)
  if words(engines) >= MOST_NAMED then
    engines = string.gsub(engines, '^%S+ ', '')
  end
  return engines .. engine .. ' '
end

-- Requeues a request whose engine has died. The death counts where the request was in the running step: its engine had
-- marked it so, or had appended to it and not marked it as waiting. Returns whether it counted.
local function requeue_after_death(id, engine, now, control)
  local req = prefix .. 'req:' .. id
  local found = call('HMGET', req, 'next', 'from', 'step', 'alone', 'died_at', 'died_on', 'died_alone', 'died_near')
  local same = found[1] == found[5]
  local on, alone = same and found[6] or '', same and found[7] or ''
  local stalled = found[3] == '2'
  if stalled then
    found[3] = '1'
  end
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
  if stalled then
    call('HSET', req, 'stalled', engine)
  elseif not same then
    call('HDEL', req, 'stalled')
  end
  if words(alone) >= CONDEMNED then
    call('HSET', req, 'state', 'queued', 'owner', '', 'nonce', '')
    call('ZADD', prefix .. 'verdicts', now + control, id)
    disown(id, engine)
  else
    requeue(id, engine, alone ~= '' and now + control or now)
  end
  return true
end

-- Records an engine's death once. The death of an engine that ran a suspect isolated is explained by the suspect, and
-- recorded with "!"; any other one shows that engines die without suspects.
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

-- The suspect that has waited longest among those that an engine may run: a begun one waits for its fingerprint for
-- `patience`, and one that needs a longer context than the engine holds (0: any) for `context_patience` (negative: for
-- ever). Returns its id and since when it waits, or nothing.
local function first_suspect(fingerprint, context, patience, context_patience, now)
  for _, id in ipairs(call('ZRANGEBYSCORE', prefix .. 'suspects', '-inf', now, 'LIMIT', 0, 16)) do
    local found = call('HMGET', prefix .. 'req:' .. id, 'print', 'next', 'context')
    local since = tonumber(call('ZSCORE', prefix .. 'suspects', id))
    local print = found[2] and found[2] ~= '0' and found[1] or ''
    local is_alike, waited = print == '' or fingerprint == '' or print == fingerprint, age(since, now)
    local fits = context == 0 or tonumber(found[3] or 0) <= context
      or context_patience >= 0 and waited >= context_patience
    if fits and (is_alike or waited >= patience) then
      return id, since
    end
  end
end

-- Removes an engine's lease, and what it asks gateways to refuse.
-- The field "up" of meta is since when an engine lives; it goes with the last one.
local function drop_lease(engine, now)
  call('ZREM', prefix .. 'leases', engine)
  call('HDEL', prefix .. 'refusals', engine)
  if call('ZCOUNT', prefix .. 'leases', now, '+inf') == 0 then
    call('HDEL', prefix .. 'meta', 'up')
  end
end

-- Whether engines died that did not run a request, since its own first death or in the window before now, whichever is
-- longer.
local function storms(had_it, died_first, now, window)
  for _, engine in ipairs(call('ZRANGEBYSCORE', prefix .. 'deaths', math.min(died_first, now - window), '+inf')) do
    if string.sub(engine, 1, 1) ~= '!' and not string.find(' ' .. had_it, ' ' .. engine .. ' ', 1, true) then
      return true
    end
  end
  return false
end

-- == Readers and disconnect graces ==
--
-- Starts the grace of a request without readers. Its field "silent" is until when its client may not have noticed that
-- the gateway died; a value that is more than minutes ahead comes from a clock that was set back.
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

-- Removes a reader; where it was the last one, the grace starts.
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

-- == The end of a request ==

-- Adds to the stream `ended` what a request used that counts for its tenant, see limits/fold.lua. Its field "counted"
-- is 1 where it does, "caller" the credential, "named" what it named as its model, "times" how many tokens were
-- generated for each that was put out, and "billed" how many of its tokens an earlier request with the same log was
-- counted with. The prompt counts once an engine has had the request, or where it has ended as it was accepted (by its
-- length).
local MOST_ENDED = 100000 -- about 20 MB; those of an outage of the tenants' node in a cluster
local function note_usage(id, reason)
  local found = call('HMGET', prefix .. 'req:' .. id, 'counted', 'tenant', 'caller', 'named', 'ptok', 'next', 'others',
    'cached', 'accepted', 'billed', 'epoch', 'times')
  if found[1] ~= '1' then
    return
  end
  local output, is_first = found[6] - found[7] - (found[10] or 0), not found[10]
  local has_prompt = is_first and (tonumber(found[11]) > 0 or reason == 'length')
  call('XADD', prefix .. 'ended', 'MAXLEN', '~', MOST_ENDED, '*', 'id', id, 'tenant', found[2], 'caller',
    found[3] or '', 'model', found[4] or '', 'requests', is_first and 1 or 0, 'prompt', has_prompt and found[5] or 0,
    'cached', is_first and found[8] or 0, 'output', math.max(0, math.ceil(output * (found[12] or 1) - 0.01)),
    'accepted', found[9], 'ended', now_ms())
end

-- Marks a request as finished and lets its keys expire; its log has had its end entry. Its field "kept" is the
-- shortest retention of a request with an idempotency key, which must not outlive it.
local function retire(id, owner, readers, reason, retention)
  local req = prefix .. 'req:' .. id
  local length = math.max(tonumber(retention), tonumber(call('HGET', req, 'kept') or 0))
  call('HSET', req, 'state', 'finished', 'reason', reason, 'ended', now_ms(), 'owner', '', 'readers', '')
  note_usage(id, reason)
  call('ZREM', prefix .. 'deadlines', id)
  call('ZREM', prefix .. 'graces', id)
  if owner ~= '' then
    disown(id, owner)
  end
  for gateway in string.gmatch(readers, '%S+') do
    call('SREM', prefix .. 'reads:' .. gateway, id)
  end
  call('PEXPIRE', req, length)
  call('PEXPIRE', prefix .. 'log:' .. id, length)
end

-- Writes a finish for each open choice, then the end with the usage. Returns the log's length.
local function write_end(id, reason, message)
  local req, log = prefix .. 'req:' .. id, prefix .. 'log:' .. id
  local found = call('HMGET', req, 'next', 'digest', 'choices', 'ptok', 'others', 'cached')
  local next_index, digest, tokens = tonumber(found[1]), found[2], found[1] - found[5]
  for choice = 0, found[3] - 1 do
    if call('HSETNX', req, 'f' .. choice, reason) == 1 then
      digest = chain(digest, 'c:' .. choice .. ':f:' .. reason)
      next_index = next_index + 1
      call('XADD', log, next_index .. '-0', 'c', choice, 'f', reason, 'd', digest)
    end
  end
  digest = chain(digest, 'end:' .. reason)
  next_index = next_index + 1
  local usage = found[4] .. ',' .. tokens .. ',' .. found[6]
  local second = string.format('%d', math.floor(now_ms() / 1000))
  call('XADD', log, next_index .. '-0', 'end', reason, 'u', usage, 'm', message, 'a', second, 'd', digest)
  call('HSET', req, 'next', next_index, 'digest', digest, 'others', next_index - tokens, 'nonce', '')
  return next_index
end

-- == What a tenant's logs take, see reserve_log.lua ==

-- Gives a reservation back. Its first write needs no memory, so that it works when Redis is full.
local function unreserve(id)
  call('ZREM', prefix .. 'open', id)
  call('ZREM', prefix .. 'kept', id)
  local bytes = call('HGET', prefix .. 'bytes', id)
  if bytes then
    call('HDEL', prefix .. 'bytes', id)
    call('DECRBY', prefix .. 'held', bytes)
  end
end

-- == A tenant's files and batches, see scripts/batches/ ==
--
-- Beside a tenant's prefix: files and batches (sorted sets of ids by the time of their creation), expiries (both, by
-- when they are removed), held (bytes of all data), and for each id file:<id>, data:<id>, batch:<id>, jobs:<id>.
local SWEPT_AT_ONCE = 100

-- Removes a file. Its first write needs no memory, so that it works when Redis is full.
local function drop_file(id)
  call('ZREM', prefix .. 'files', id)
  call('ZREM', prefix .. 'expiries', id)
  local bytes = call('STRLEN', prefix .. 'data:' .. id)
  call('UNLINK', prefix .. 'data:' .. id, prefix .. 'file:' .. id)
  if bytes > 0 then
    call('DECRBY', prefix .. 'held', bytes)
  end
end

local function drop_batch(id)
  call('ZREM', prefix .. 'batches', id)
  call('ZREM', prefix .. 'expiries', id)
  call('UNLINK', prefix .. 'batch:' .. id, prefix .. 'jobs:' .. id)
end

-- Removes what has expired; a file that a batch still reads stays. Returns the bytes that are held.
local function sweep_files(now)
  for _, id in ipairs(call('ZRANGEBYSCORE', prefix .. 'expiries', '-inf', now, 'LIMIT', 0, SWEPT_AT_ONCE)) do
    if string.sub(id, 1, 6) == 'batch_' then
      drop_batch(id)
    elseif tonumber(call('HGET', prefix .. 'file:' .. id, 'uses') or 0) > 0 then
      call('ZADD', prefix .. 'expiries', now + 60000, id)
    else
      drop_file(id)
    end
  end
  return tonumber(call('GET', prefix .. 'held') or 0)
end

-- Whether a driver holds the lease of a batch. What another one has taken over is fenced by its token.
local function drives(id, token)
  return call('HGET', prefix .. 'batch:' .. id, 'owner') == token
end
