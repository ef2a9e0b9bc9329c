-- Read in what state requests of a partition are.
-- Run by: limits.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: request ids
-- Returns: for each 'none', 'queued' (no engine has claimed it yet), 'claimed', 'ended', or 'past' (it ended so long
--          ago that what it used would have been counted).
-- Retry: harmless, it only reads.
local MOST_UNCOUNTED_MS = 300000
local out, now = {}, now_ms()
for place, id in ipairs(ARGV) do
  local found = call('HMGET', prefix .. 'req:' .. id, 'state', 'epoch', 'ended')
  if not found[1] then
    out[place] = 'none'
  elseif found[1] == 'finished' then
    out[place] = age(found[3] or 0, now) < MOST_UNCOUNTED_MS and 'ended' or 'past'
  else
    out[place] = tonumber(found[2] or 0) > 0 and 'claimed' or 'queued'
  end
end
return out
