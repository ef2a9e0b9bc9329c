-- Free an idempotency key whose request was refused, once no other try may have been accepted under it.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of what stands beside the reservation, and a second name in its slot (see prelude.lua).
-- ARGV: [1] the request id that it stands for, [2] the try that was refused
-- Returns: 1 where this call has freed the key, else 0: without the set nobody knows whether a try was accepted.
-- Retry: harmless, a try is removed once, and a later reservation has another id.
local key, tries = string.match(prefix, '{(.*)}'), prefix .. 'tries'
if call('EXISTS', tries) == 0 then
  return 0
end
call('SREM', tries, ARGV[2])
if call('EXISTS', tries) == 1 then
  return 0
end
local found = call('GET', key)
if found and string.match(found, '^%S*') == ARGV[1] then
  call('DEL', key)
end
return 1
