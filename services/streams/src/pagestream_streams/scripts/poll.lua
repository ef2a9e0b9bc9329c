-- Read the lengths of logs.
-- Run by: gateway/readers.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: request ids
-- Returns: for each id its next index, and 1 if it is finished, else 0; -1 and 1 where there is no such request.
-- Retry: harmless, it only reads.
local out = {}
for i = 1, #ARGV do
  local found = call('HMGET', prefix .. 'req:' .. ARGV[i], 'next', 'state')
  out[2 * i - 1] = tonumber(found[1] or -1)
  out[2 * i] = (not found[1] or found[2] == 'finished') and 1 or 0
end
return out
