-- Read where a request stands.
-- Run by: admin/broker.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] tenant
-- Returns: {spec, state, reason, next index, digest, prompt tokens, completion tokens, cached tokens, attempts, its
--          queue and its entry there ('': it is not in a queue), fingerprint, its rank there ('': none), '1' where it
--          is discarded}, or nothing where the tenant has no such request.
-- Retry: harmless, it only reads.
local found = call('HMGET', prefix .. 'req:' .. ARGV[1], 'spec', 'state', 'reason', 'next', 'digest', 'ptok', 'others',
  'cached', 'attempts', 'tenant', 'queue', 'entry', 'print', 'rank',
  'discarded')
if not found[10] or found[10] ~= ARGV[2] then
  return false
end
return {found[1], found[2], found[3] or '', found[4], found[5], found[6], found[4] - found[7], found[8], found[9],
  found[11] or '', found[12] or '', found[13] or '',
  found[14] or '', found[15] or ''}
