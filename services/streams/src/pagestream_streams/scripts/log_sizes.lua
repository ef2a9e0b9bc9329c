-- Read what the records and logs of requests take.
-- Run by: gateway/accept.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: request ids
-- Returns: for each id its bytes (-1: it has not finished; 0: there is no such request) and the ms until it expires.
-- Retry: harmless, it only reads.
local NODES = 256 -- of a log, of 100 entries each: they are alike, and a longer log is estimated from its first ones
local out = {}
for _, id in ipairs(ARGV) do
  local req, log = prefix .. 'req:' .. id, prefix .. 'log:' .. id
  local state, bytes, rest = call('HGET', req, 'state'), 0, 0
  if state == 'finished' then
    -- All fields of a record count: "spec" may be a thousand times as large as another one.
    bytes = call('MEMORY', 'USAGE', req, 'SAMPLES', 0) + (call('MEMORY', 'USAGE', log, 'SAMPLES', NODES) or 0)
    rest = math.max(0, call('PTTL', req))
  elseif state then
    bytes = -1
  end
  out[#out + 1], out[#out + 2] = bytes, rest
end
return out
