-- Claim requests for an engine: take them from their queues, raise their epochs, record owner, nonce and lease.
--
-- The queues of begun requests ("resume") come first; then the entry with the earliest virtual arrival, which is its
-- arrival plus class * ageing, or as the engines' policy ranks them (docs/design/queueing.md). Both are one number, the
-- entry's key (see order_key in prelude.lua), so that an engine can compare the heads of partitions and claim only what
-- comes before a bound (docs/design/queueing.md). An engine that
-- holds nothing gets a suspect before all that, and then nothing else (docs/design/fencing.md). One that needs a longer
-- context than the engine holds is left to other engines for ARGV[18]. Entries are looked at until LOOK_BEHIND more
-- than the first were too large for the room, MOST_LEFT were left to other engines, or MOST_CACHED only because those
-- have their beginnings (docs/design/prefix-cache.md).
-- Run by: engine/claim.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id, [2] nonce (random), [3] most requests (0: only look), [4] most tokens
--       [5] least age of an entry in ms; where it is not 0, entries also have their own, see ARGV[27] of accept.lua
--       [6] ageing in ms, [7] lease in ms, [8] drain window in ms
--       [9] whether the engine holds nothing (0 | 1)
--       [10] the engine's fingerprint ('': unknown)
--       [11] how long begun requests wait for an engine with their fingerprint, in ms
--       [12] control time in ms (see prelude.lua)
--       [13] whether to take only requests begun with this fingerprint (0 | 1)
--       [14] the context that the engine holds (0 or none: any)
--       [15] whether the engine keeps its room for an entry that is too large and must not be overtaken (0 | 1)
--       [16] the greatest key to claim ('' or none: any)
--       [17] most tokens of the entry that the reply names as the next one ('' or none: what is left of [4])
--       [18] how long requests that need a longer context are left to others, in ms (negative: for ever)
--       [19] the greatest class to claim, and then no begun requests ('' or none: all); what has a lower class and an
--            earlier key is not overtaken
--       [20] the virtual time that the engine knows from all partitions (none: 0), see the policy "fair" in accept.lua
--       [21] the greatest class to claim of requests that are not begun ('' or none: all)
--       [22] for how long entries are left longer at most, whatever they say, in ms ('' or none: as they say)
-- Returns: {now, what is next, {id, spec, epoch, next index, digest, attempts, deadline, isolated (0 | 1), cached
--          tokens, ms in its queue, key}...}. What is next: {whether a suspect waits that this engine may run (0 | 1),
--          ms until an entry may be taken that is left to other engines (-1: none), the room that the rest is about,
--          the partition's virtual time; where entries may be taken: key and tokens of the first one, whether it must
--          not be overtaken (0 | 1); where that is larger than the room, but another one isn't: key and tokens of the
--          first that isn't}.
-- Retry: claims more. Requests of a lost reply are owned by the engine, whose heartbeats hand them back.
local engine, nonce, max_requests, max_tokens = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local min_age, ageing, lease, window = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local idle, fingerprint, patience, control = ARGV[9] == '1', ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
local retired, context = ARGV[13] == '1', tonumber(ARGV[14] or 0)
local context_patience = tonumber(ARGV[18])
local keeps_room, bound = ARGV[15] == '1', tonumber(ARGV[16] or '') or math.huge
local greatest_class, greatest_new_class = tonumber(ARGV[19] or ''), tonumber(ARGV[21] or '')
local meta, now, drained = prefix .. 'meta', now_ms(), 0
local claims, HEAD = {now, {}}, 2
local drained_tokens, drained_longest, drained_of = 0, 0, {}
local LOOK_BEHIND, MOST_LEFT, MOST_CACHED = 16, 256, 16
local most_longer = tonumber(ARGV[22] or '') or math.huge
local known = call('HMGET', meta, 'classes', 'prints', 'policy', 'virtual')
local policy, virtual_time = known[3], math.max(tonumber(known[4] or 0), tonumber(ARGV[20] or 0))
local class_step = policy == 'fair' and 0 or ageing -- tenants, not classes

-- Makes a queued request this engine's; false where it is not queued any more.
local function own(id, alone, since, key)
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
    found[7], math.max(0, now - since), key}
  return true
end

local function claim_suspect()
  local id, since = first_suspect(fingerprint, context, patience, context_patience, now)
  while id do
    call('ZREM', prefix .. 'suspects', id)
    if own(id, '1', since, 0) then
      return true
    end
    id, since = first_suspect(fingerprint, context, patience, context_patience, now)
  end
  return false
end

-- == What this engine may take ==

local ripens = -1 -- ms until the first entry that is left to other engines may be taken

-- The context that an entry's request needs.
local function context_of(entry)
  local fields = entry[2]
  return tonumber(fields[5] == 'c' and fields[6] or call('HGET', prefix .. 'req:' .. fields[2], 'context') or 0)
end

-- An entry of a queue, or nothing where it is left to other engines; then also whether all behind it are, and whether
-- it is only because the engine of its partition has its beginning.
local function candidate(queue, entry)
  local arrival, least = tonumber(string.match(entry[1], '^%d+')), min_age
  local id, print = entry[2][2], queue.print
  local is_foreign = print ~= '' and fingerprint ~= '' and print ~= fingerprint
  local waited = age(arrival, now)
  if is_foreign then
    least = math.max(least, patience)
  end
  local is_last = waited < least and not queue.ranks -- those behind it are younger
  if waited >= least and context > 0 and context_of(entry) > context then
    least = context_patience < 0 and math.huge or math.max(least, context_patience)
  end
  local is_cached = false
  if waited >= least and min_age > 0 and entry[2][7] == 'l' then
    least = min_age + math.min(tonumber(entry[2][8]), most_longer)
    is_cached = waited < least
  end
  if waited < least then
    if least < math.huge then
      ripens = ripens < 0 and least - waited or math.min(ripens, least - waited)
    end
    return nil, is_last, is_cached
  end
  return {queue = queue, entry = entry[1], id = id, tokens = tonumber(entry[2][4]), arrival = arrival,
    key = order_key(queue.name, entry[3] or arrival, class_step), stays = queue.begun or waited >= ageing}
end

-- Ranks the entries of a queue that have no rank, where the numbers of both show that there are some: a gateway of a
-- version without ranks may have added them, and a new policy begins with none.
local function index(queue)
  local name, known = prefix .. 'queue:' .. queue.name, {}
  if call('ZCARD', queue.ranks) == call('XLEN', name) then
    return
  end
  local ranks = call('ZRANGE', queue.ranks, 0, -1, 'WITHSCORES')
  for i = 1, #ranks, 2 do
    known[ranks[i]] = ranks[i + 1]
  end
  call('DEL', queue.ranks)
  for _, entry in ipairs(call('XRANGE', name, '-', '+')) do
    local rank = policy == 'fair' and virtual_time or rank_by_work(entry[1], tonumber(entry[2][4]), ageing)
    call('ZADD', queue.ranks, known[entry[1]] or rank, entry[1])
  end
end

-- Up to `count` entries of a queue in its order, from a position on: an index among the ranks, or the least entry id.
-- Those of a queue with ranks have theirs as their third value.
local function entries_from(queue, from, count)
  local name, found = prefix .. 'queue:' .. queue.name, {}
  if not queue.ranks then
    return call('XRANGE', name, from, '+', 'COUNT', count)
  end
  local ranks = call('ZRANGE', queue.ranks, from, from + count - 1, 'WITHSCORES')
  for i = 1, #ranks, 2 do
    local entry = call('XRANGE', name, ranks[i], ranks[i])[1]
    if not entry then -- an engine of a version without ranks took it
      call('ZREM', queue.ranks, ranks[i])
      index(queue)
      return entries_from(queue, from, count)
    end
    entry[3], found[#found + 1] = tonumber(ranks[i + 1]), entry
  end
  return found
end

-- Finds a queue's first entry that this engine may take, and the first of those that fits into the room. Returns
-- whether the queue has any.
local function look(queue)
  local from, count, seen, large, left, cached = queue.from, 1, 0, 0, queue.left, queue.cached
  queue.first, queue.fit = nil, nil
  repeat
    local entries = entries_from(queue, from, count)
    for _, entry in ipairs(entries) do
      local found, is_last, is_cached = candidate(queue, entry)
      queue.first, from = queue.first or found, queue.ranks and from + 1 or '(' .. entry[1]
      if found and found.tokens <= max_tokens then
        queue.fit = found
        return true
      elseif found then
        large = large + 1
      else
        left, cached = left + 1, cached + (is_cached and 1 or 0)
        if not queue.first then
          queue.from, queue.left, queue.cached = from, left, cached -- the same for all of this script
        end
      end
      if is_last or large > LOOK_BEHIND or left >= MOST_LEFT or cached >= MOST_CACHED then
        return true
      end
    end
    seen = seen + #entries
    local is_over = #entries < count
    count = LOOK_BEHIND
  until is_over
  return seen > 0
end

local queues = {}
local function add(name, print)
  local queue = {name = name, print = print, begun = string.sub(name, 1, 6) == 'resume', from = '-', left = 0,
    cached = 0}
  local class = tonumber(name)
  if retired and name ~= 'resume:' .. fingerprint or greatest_class and not class
    or greatest_new_class and class and class > greatest_new_class then
    return call('EXISTS', prefix .. 'queue:' .. name) == 1
  end
  if class and RANKED[policy] then
    queue.ranks, queue.from = prefix .. 'ranks:' .. name, 0
    index(queue)
  end
  queues[#queues + 1] = queue
  return look(queue)
end
for class in string.gmatch(known[1] or '', '%d+') do
  add(class, '')
end
add('resume', '')
local prints = ' '
for print in string.gmatch(known[2] or '', '%S+') do
  if add('resume:' .. print, print) then
    prints = prints .. print .. ' '
  else
    call('DEL', prefix .. 'queue:resume:' .. print)
  end
end
if known[2] and known[2] ~= prints then
  call('HSET', meta, 'prints', prints)
end

-- Whether a candidate comes before another one, if there is one; of equal keys the higher class.
local function precedes(one, other)
  return not other or one.key < other.key or one.key == other.key and one.queue.name < other.queue.name
end

-- The first entry of all queues, and the first that fits into the room; nothing for none.
local function choose()
  local first, fit
  for _, queue in ipairs(queues) do
    if queue.fit and queue.fit.tokens > max_tokens then
      look(queue) -- the room was larger
    end
    first = queue.first and precedes(queue.first, first) and queue.first or first
    fit = queue.fit and precedes(queue.fit, fit) and queue.fit or fit
  end
  return first, fit
end

-- The smallest key of an entry that is too large for the room and must not be overtaken.
local function reserved()
  local least = math.huge
  for _, queue in ipairs(queues) do
    if queue.first and queue.first.stays and queue.first.tokens > max_tokens then
      least = math.min(least, queue.first.key)
    end
  end
  return least
end

-- == Claims ==

local alone = idle and max_requests > 0 and call('ZCARD', prefix .. 'suspects') > 0
  and control_is_over(now, control) and claim_suspect()
while not alone and #claims - HEAD < max_requests do
  local _, best = choose()
  if not best or best.key > bound or keeps_room and best.key > reserved()
    or greatest_class and tonumber(best.queue.name) > greatest_class then
    break
  end
  local queue = prefix .. 'queue:' .. best.queue.name
  call('XACK', queue, GROUP, best.entry) -- where another consumer has read it
  call('XDEL', queue, best.entry)
  uncount(best.id, best.queue.name, best.tokens)
  if best.queue.ranks then
    call('ZREM', best.queue.ranks, best.entry)
    virtual_time = policy == 'fair' and math.max(virtual_time, best.key) or virtual_time
  end
  if not best.queue.begun then
    drained, drained_tokens = drained + 1, drained_tokens + best.tokens
    drained_longest = math.max(drained_longest, best.tokens)
    drained_of[best.queue.name] = (drained_of[best.queue.name] or 0) + best.tokens
  end
  if own(best.id, '', best.arrival, best.key) then
    max_tokens = max_tokens - best.tokens
  end
  look(best.queue)
end
if #claims > HEAD then
  call('ZADD', prefix .. 'leases', now + lease, engine)
end
if virtual_time > tonumber(known[4] or 0) then
  although_full() -- where nothing is claimed, this is the first write
  call('HSET', meta, 'virtual', virtual_time)
end
if drained > 0 then
  local from, before, tokens, longest = unpack(call('HMGET', meta, 'drain_from', 'drained', 'drained_tokens',
    'drained_longest'))
  local span, kept = drain_span(from, now), 1
  if not span or span > 2 * window then
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

max_tokens = tonumber(ARGV[17] or '') or max_tokens
for _, queue in ipairs(queues) do
  if queue.first and queue.first ~= queue.fit then
    look(queue) -- in the room that the reply is about
  end
end
local first, fit = choose()
local suspects = not retired and call('ZCARD', prefix .. 'suspects') > 0 and control_is_over(now, control)
  and first_suspect(fingerprint, context, patience, context_patience, now)
local next_one = {suspects and 1 or 0, ripens, max_tokens, virtual_time}
if first then
  -- Where a later one stays, the engine's room is kept from the first one on.
  local stays = first.stays or keeps_room and reserved() < math.huge
  next_one[5], next_one[6], next_one[7] = first.key, first.tokens, stays and 1 or 0
  if fit and fit ~= first then
    next_one[8], next_one[9] = fit.key, fit.tokens
  end
end
claims[2] = next_one
return claims
