-- Take requests without a record out of their tenant's list, once they were added so long ago that it may have expired.
--
-- A younger one may be accepted again by a gateway that reads it: Redis has lost its record.
-- Run by: admin/broker.py.
-- KEYS: the tenant's list, see enlist.lua.
-- ARGV: [1] how long ago, in ms; then request ids
-- Returns: how many of them are still in the list.
-- Retry: harmless, it counts what is left.
local list, time = KEYS[1], call('TIME')
local before, left = time[1] * 1000000 + time[2] - ARGV[1] * 1000, 0
for i = 2, #ARGV do
  local added = call('ZSCORE', list, ARGV[i])
  if added and tonumber(added) <= before then
    call('ZREM', list, ARGV[i])
  elseif added then
    left = left + 1
  end
end
return left
