-- Free an idempotency key whose request its tenant discards: the next try with it is a new request.
-- Run by: admin/broker.py.
-- KEYS: the prefix of what stands beside the reservation, and a second name in its slot (see prelude.lua).
-- ARGV: [1] the request id that it stands for
-- Returns: 1 where this call has freed the key, else 0.
-- Retry: harmless, a later reservation has another id.
local key = string.match(prefix, '{(.*)}')
local found = call('GET', key)
if not found or string.match(found, '^%S*') ~= ARGV[1] then
  return 0
end
call('DEL', key, prefix .. 'tries')
return 1
