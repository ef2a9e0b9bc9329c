-- End a request from outside, in whatever state it is: write a finish for each open choice, then the end with the
-- usage.
-- Run by: admin/broker.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] tenant ('': any), [3] reason, [4] retention in ms
--       [5] condition ('': none; 'deadlines' | 'graces' | 'verdicts': end it only if it is due there now; with
--           'verdicts' it is also listed as quarantined)
--           With 'unclaimed' it is ended only if it has no deadline, no engine has ever claimed it, and it was accepted
--           ARGV[8] ms ago; with 'queued' only if no engine runs it.
--       [6] error ('': none), [7] most quarantined requests listed in the partition, [8] see [5]
-- Returns: {1, reason, next index, readers, tenant} ended now; {2, reason, next index, '', tenant} had ended before;
--          {0} not found; {3} not due.
-- Retry: harmless, a finished request stays as it is.
local id, tenant, reason, retention, condition, message = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local req = prefix .. 'req:' .. id
local found = call('HMGET', req, 'state', 'tenant', 'next', 'owner', 'queue', 'entry', 'ptok', 'readers', 'reason',
  'attempts', 'died_on', 'epoch', 'deadline', 'accepted')
local state, next_index = found[1], tonumber(found[3] or 0)
if not state or tenant ~= '' and tenant ~= found[2] then
  if condition ~= '' then
    call('ZREM', prefix .. condition, id)
  end
  return {0}
end
if state == 'finished' then
  return {2, found[9], next_index, '', found[2]}
end
if condition == 'unclaimed' then
  local has_deadline, is_new = tonumber(found[13] or 0) > 0, tonumber(found[14] or 0) > now_ms() - ARGV[8]
  if state ~= 'queued' or tonumber(found[12] or 0) > 0 or has_deadline or is_new then
    return {3}
  end
elseif condition == 'queued' then
  if state ~= 'queued' then
    return {3}
  end
elseif condition ~= '' then
  local due = call('ZSCORE', prefix .. condition, id)
  if not due or tonumber(due) > now_ms() then
    return {3}
  end
end

although_full()
call('ZREM', prefix .. 'graces', id)
call('HDEL', req, 'queue', 'entry')
call('ZREM', prefix .. 'suspects', id)
call('ZREM', prefix .. 'verdicts', id)
if condition == 'verdicts' then
  local said = string.match(message, '%z(.*)$') or message
  local dead = call('XADD', prefix .. 'dead', 'MAXLEN', '~', ARGV[7], '*', 'id', id, 'tenant', found[2],
    'reason', said, 'index', found[3], 'attempts', found[10] or 0, 'engines', found[11] or '')
  call('HSET', req, 'dead', dead, 'dead_index', found[3])
end
if found[5] then
  local queue = prefix .. 'queue:' .. found[5]
  if call('XDEL', queue, found[6]) == 1 then
    uncount(id, found[5], found[7])
    call('ZREM', prefix .. 'ranks:' .. found[5], found[6])
  end
end
next_index = write_end(id, reason, message)
retire(id, found[4], found[8], reason, retention)
return {1, reason, next_index, found[8], found[2]}
