-- Read in what state requests of a partition are.
-- Run by: limits/admission.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: request ids
-- Returns: for each 'none', 'queued' (no engine has claimed it yet), 'claimed' or 'ended'.
-- Retry: harmless, it only reads.
local out = {}
for place, id in ipairs(ARGV) do
  local found = call('HMGET', prefix .. 'req:' .. id, 'state', 'epoch')
  if not found[1] then
    out[place] = 'none'
  elseif found[1] == 'finished' then
    out[place] = 'ended'
  else
    out[place] = tonumber(found[2] or 0) > 0 and 'claimed' or 'queued'
  end
end
return out
