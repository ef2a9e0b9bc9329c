-- Reserve an idempotency key for a request id, or join the id that it is reserved for. Joins also when Redis is full.
--
-- The reservation is the key named in the hash tag; beside it the set "tries" has what tries have not been refused. The
-- member '' stands for tries that the set does not know, of a version without it or from before it expired.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of what stands beside the reservation, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] digest of the body, [3] how long it is kept, in ms, [4] this try (random)
-- Returns: the id that the key stands for, or nothing where it was used with another body.
-- Retry: harmless, the second run joins the first.
local key, tries, length = string.match(prefix, '{(.*)}'), prefix .. 'tries', ARGV[3]
local found = call('GET', key)
local id = ARGV[1]
if found then
  local digest
  id, digest = string.match(found, '^(%S*) (.*)$')
  if digest ~= ARGV[2] then
    return false
  end
  call('PEXPIRE', key, length)
  if call('EXISTS', tries) == 0 then
    call('SADD', tries, '')
  end
else
  call('DEL', tries)
  call('SET', key, id .. ' ' .. ARGV[2], 'PX', length)
end
call('SADD', tries, ARGV[4])
call('PEXPIRE', tries, length)
return id
