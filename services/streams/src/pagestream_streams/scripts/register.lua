-- Register a gateway as a reader of a request, which ends its disconnect grace. Runs also when Redis is full.
-- Run by: gateway/readers.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] tenant, [3] gateway id, [4] gateway lease in ms
-- Returns: {next index, finished (0 | 1), ms until its deadline (at least 1; 0: none)}, or nothing where the tenant has
--          no such request.
-- Retry: harmless, a reader is registered once.
local id, gateway = ARGV[1], ARGV[3]
local found, now = call('HMGET', prefix .. 'req:' .. id, 'tenant', 'state', 'readers', 'next', 'deadline'), now_ms()
if not found[1] or found[1] ~= ARGV[2] then
  return false
end
local finished = found[2] == 'finished'
if not finished then
  although_full()
  add_reader(id, found[3], gateway)
  call('ZADD', prefix .. 'gateways', now + ARGV[4], gateway)
end
local deadline = tonumber(found[5] or 0)
return {tonumber(found[4]), finished and 1 or 0, deadline > 0 and math.max(1, deadline - now) or 0}
