-- Requeue a quarantined request under a new id, from where it stood, as a suspect. Its own log keeps its end.
-- Run by: admin/broker.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] id, [2] new id, [3] the new id's spec, [4] deadline in ms from now (0: none), [5] disconnect grace in ms
--       [6] continue on disconnect (0 | 1), [7] doorbell channel, [8] partition number
--       [9] the removal after which the model was published again, see forget.lua ('' or none: unknown)
-- Returns: {the new id}; {'', removal} where the model was removed; nothing where no such request is quarantined.
-- Retry: harmless, the second run returns the new id of the first.
local id, new, spec, deadline, grace, continue = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local old, req, log, now = prefix .. 'req:' .. id, prefix .. 'req:' .. new, prefix .. 'log:' .. new, now_ms()
local found = call('HMGET', old, 'dead', 'revived_as', 'dead_index', 'tenant', 'class', 'ptok', 'choices', 'cached',
  'attempts', 'print', 'died_on', 'context', 'counted', 'caller', 'named', 'times')
if not found[1] then
  return false
end
if found[2] then
  return {found[2]}
end
local removed = call('GET', prefix .. 'removed')
if removed and removed ~= ARGV[9] then
  return {'', removed}
end
local index, digest, tokens = tonumber(found[3]), '', 0
call('HSET', req, 'spec', spec, 'tenant', found[4], 'class', found[5], 'ptok', found[6], 'choices', found[7],
  'cached', found[8], 'attempts', found[9], 'state', 'queued', 'epoch', 0, 'nonce', '', 'owner', '', 'readers', '',
  'accepted', now, 'deadline', deadline > 0 and now + deadline or 0, 'grace', grace, 'continue', continue,
  'revived_from', id, 'print', found[10] or '', 'died_at', index, 'died_on', found[11], 'died_alone', '',
  'died_first', now, 'context', found[12] or 0)
if index > 0 then
  for _, entry in ipairs(call('XRANGE', prefix .. 'log:' .. id, '-', index .. '-0')) do
    local fields, values = {}, entry[2]
    for i = 1, #values, 2 do
      fields[values[i]] = values[i + 1]
    end
    call('XADD', log, entry[1], unpack(values))
    digest = fields.d
    if fields.t then
      tokens = tokens + 1
    elseif fields.f then
      call('HSET', req, 'f' .. fields.c, fields.f)
    end
  end
end
call('HSET', req, 'next', index, 'digest', digest, 'others', index - tokens)
if found[13] then
  call('HSET', req, 'counted', found[13], 'caller', found[14] or '', 'named', found[15] or '', 'billed', tokens,
    'times', found[16] or 1)
end
if deadline > 0 then
  call('ZADD', prefix .. 'deadlines', now + deadline, new)
end
call('ZADD', prefix .. 'suspects', now, new)
call('HSET', old, 'revived_as', new)
if removed then
  call('DEL', prefix .. 'removed')
end
call('PUBLISH', ARGV[7], ARGV[8])
return {new}
