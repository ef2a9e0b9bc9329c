-- Accept a request: write its record and its queue entry, and register the gateway as its reader. One that ends as it
-- is accepted (ARGV[21]) gets its whole log instead: it uses no bounds, and no engine can find it.
--
-- When Redis is full a new request is refused (OOM), and a known one is joined.
-- A tenant may use a class' bounds up to its share: while no other tenant waits, the share of a tenant alone
-- (ARGV[17]); else its weight among the weights of all tenants that wait. The first request of a tenant is exempt
-- from the share.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] spec, [3] tenant, [4] class, [5] prompt tokens, [6] choices
--       [7] deadline in ms from now (0: none), [8] disconnect grace in ms, [9] continue on disconnect (0 | 1)
--       [10] gateway id ('': none), [11] gateway lease in ms
--       [12] bound of requests, [13] bound of prompt tokens (each for this class in this partition)
--       [14] doorbell channel, [15] partition number
--       [16] weight of the tenant, [17] share of a tenant alone in percent
--       [18] whether the bounds apply (0: the request was accepted before, and Redis lost it)
--       [19] the context that it needs: tokens of its longest prompt and of its output at most (0 or none: any)
--       [20] how long it is kept after its end at least, and after this call where it has ended, in ms (0 or none: the
--            retention of any request)
--       [21] whether it ends as it is accepted, with no tokens (0 or none: it runs), and [22] its retention in ms then
--       [23] the removal after which the model was published again, see forget.lua ('' or none: unknown)
--       [24] the output tokens that are expected of it (none: 0)
--       [25] the greatest virtual time of the tenant that the caller knows (none: 0), see the policy "fair"
--       [26] how far behind its arrival the policy "shortest_first" ranks a request at most, in ms (none: 0)
--       [27] for how long engines that don't own the partition leave it longer than others, in ms (none: 0)
--       [28] when the caller learnt [25], by the time that a reply had (none: 0)
--       [29] whether what it uses is counted for its tenant (0 or none: no), [30] the credential, [31] what it named as
--       its model, [32] how many tokens are generated for each that is put out (1 or none: it alone)
-- Returns: {1, virtual time of the tenant (0: none), now, since when the queues go by their policy} accepted;
--          {2} was accepted before; {3} the id is another tenant's; {4, removal} the model was removed;
--          {0, requests, tokens, drained, drain window in ms, bound of requests, bound of tokens, whose bound it is
--          (0: all tenants', 1: this tenant's)} beyond a bound; {5, class} every living engine asks to refuse this
--          class and the lower ones, from `class` on, see docs/design/admission.md.
-- Retry: harmless, a record that exists is only read.
local id, spec, tenant, class, tokens, choices = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local deadline, grace, continue, gateway, lease = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local max_requests, max_tokens = tonumber(ARGV[12]), tonumber(ARGV[13])
local req, meta, now = prefix .. 'req:' .. id, prefix .. 'meta', now_ms()

local kept, expected = tonumber(ARGV[20] or 0), tonumber(ARGV[24] or 0)
local weight, alone_share, bounded = tonumber(ARGV[16]), tonumber(ARGV[17]) / 100, ARGV[18] == '1'

-- {queued requests of the tenant, their tokens, its bound of requests, its bound of tokens}.
local function portion()
  local key = prefix .. 'tenants:' .. class
  local mine = call('HMGET', key, 'r' .. tenant, 't' .. tenant, 'w' .. tenant)
  local others = (call('HGET', meta, 'weights:' .. class) or 0) - (mine[3] or 0)
  local share = others > 0 and weight / (weight + others) or alone_share
  local most = math.max(1, math.floor(max_requests * share))
  return {tonumber(mine[1] or 0), tonumber(mine[2] or 0), most, math.floor(max_tokens * share)}
end

-- The least class that every living engine asks to refuse; nothing where there is none.
local function refused_class()
  if call('EXISTS', prefix .. 'refusals') == 0 then
    return nil
  end
  local least
  for _, engine in ipairs(call('ZRANGEBYSCORE', prefix .. 'leases', now, '+inf')) do
    local wanted = tonumber(call('HGET', prefix .. 'refusals', engine) or '')
    if not wanted then
      return nil
    end
    least = math.max(least or wanted, wanted)
  end
  return least
end

local function write_record()
  call('HSET', req, 'spec', spec, 'tenant', tenant, 'class', class, 'ptok', tokens, 'choices', choices,
    'others', 0, 'cached', 0, 'state', 'queued', 'epoch', 0, 'nonce', '', 'owner', '', 'next', 0, 'digest', '',
    'readers', '', 'attempts', 0, 'accepted', now, 'deadline', deadline > 0 and now + deadline or 0,
    'grace', grace, 'continue', continue, 'context', ARGV[19] or 0, 'kept', kept,
    'expected', expected)
  if ARGV[29] == '1' then
    call('HSET', req, 'counted', 1, 'caller', ARGV[30], 'named', ARGV[31])
    if tonumber(ARGV[32] or 1) > 1 then
      call('HSET', req, 'times', ARGV[32])
    end
  end
end

-- The place of a new request in the order of a policy that ranks. "fair" is start-time fair queueing: the sorted set
-- `fair` has the virtual time of each tenant that is ahead of the partition's, which claim.lua moves on. What a tenant
-- has in other partitions the caller knows, as far as it went through it. What it learnt before the queues went by
-- "fair" counts not: the partition and its virtual time may have been lost since then.
local function rank_of(policy, entry, virtual_time, since)
  local work, fair = tokens + expected, prefix .. 'fair'
  if policy == 'shortest_first' then
    return rank_by_work(entry, work, tonumber(ARGV[26] or 0)), 0
  end
  local brought = tonumber(ARGV[28] or 0) >= since and tonumber(ARGV[25] or 0) or 0
  local start = math.max(virtual_time, brought, tonumber(call('ZSCORE', fair, tenant) or 0))
  local ends = start + math.max(1, math.ceil(work / weight))
  call('ZREMRANGEBYSCORE', fair, '-inf', virtual_time)
  call('ZADD', fair, ends, tenant)
  return start, ends
end

local known, tenant_time, since = call('HMGET', req, 'state', 'readers', 'tenant', 'kept', 'discarded'), 0, 0
if known[3] and known[3] ~= tenant then
  return {3}
end
local removed = not known[1] and call('GET', prefix .. 'removed')
if removed and removed ~= ARGV[23] then
  return {4, removed}
end
if known[1] then
  although_full()
  if known[1] ~= 'finished' and kept > tonumber(known[4] or 0) then
    call('HSET', req, 'kept', kept) -- who accepted it may be of a version without this field
  elseif known[1] == 'finished' and kept > 0 and not known[5] then
    for _, key in ipairs({req, prefix .. 'log:' .. id}) do
      if call('PTTL', key) < kept then
        call('PEXPIRE', key, kept)
      end
    end
  end
elseif ARGV[21] == '1' then
  write_record()
  write_end(id, 'length', '')
  retire(id, '', '', 'length', ARGV[22])
  if removed then
    call('DEL', prefix .. 'removed')
  end
  return {1, 0, now, 0}
else
  local requests = call('XLEN', prefix .. 'queue:' .. class)
  local state = call('HMGET', meta, 'tokens:' .. class, 'classes', 'drain_from', 'drained', 'policy', 'virtual',
    'outputs:' .. class, 'policy_since')
  local queued = tonumber(state[1] or 0)
  since = tonumber(state[8] or 0)
  local window = drain_span(state[3], now)
  local drained = window and tonumber(state[4] or 0) or 0
  window = window or 0
  if bounded and (requests + 1 > max_requests or queued + tokens > max_tokens) then
    return {0, requests, queued, drained, window, max_requests, max_tokens, 0}
  end
  local refused = bounded and refused_class()
  if refused and tonumber(class) >= refused then
    return {5, refused}
  end
  local mine = portion()
  -- A tenant's first request may have any size.
  if bounded and mine[1] > 0 and (mine[1] + 1 > mine[3] or mine[2] + tokens > mine[4]) then
    return {0, mine[1], mine[2], drained, window, mine[3], mine[4], 1}
  end
  write_record()
  local classes = state[2] or ' '
  if not string.find(classes, ' ' .. class .. ' ', 1, true) then
    call('HSET', meta, 'classes', classes .. class .. ' ')
  end
  if bounded then
    call('HINCRBY', meta, 'tokens:' .. class, tokens)
    charge(class, tenant, tokens, weight)
    local outputs = tonumber(state[7] or 0)
    if requests == 0 and outputs ~= expected then -- engines of a version without this sum don't subtract
      call('HSET', meta, 'outputs:' .. class, expected)
    elseif requests > 0 and expected > 0 then
      call('HINCRBY', meta, 'outputs:' .. class, expected)
    end
    local entry = enqueue(id, class, tokens, ARGV[19] or 0, ARGV[27] or 0)
    if RANKED[state[5]] then
      local rank
      rank, tenant_time = rank_of(state[5], entry, tonumber(state[6] or 0), since)
      call('ZADD', prefix .. 'ranks:' .. class, rank, entry)
      call('HSET', req, 'rank', rank)
    end
  else
    enqueue(id, 'resume', tokens)
  end
  if deadline > 0 then
    call('ZADD', prefix .. 'deadlines', now + deadline, id)
  end
  if removed then
    call('DEL', prefix .. 'removed')
  end
end
if gateway ~= '' and known[1] ~= 'finished' then
  add_reader(id, known[2] or '', gateway)
  call('ZADD', prefix .. 'gateways', now + lease, gateway)
end
call('PUBLISH', ARGV[14], ARGV[15])
return {known[1] and 2 or 1, tenant_time, now, since}
