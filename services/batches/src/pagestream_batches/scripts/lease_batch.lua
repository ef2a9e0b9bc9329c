-- Take or renew a driver's lease of a batch, also when Redis is full.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] the driver's token, [3] ms of the lease; 0 gives it back, [4] what the batch waits for
-- Returns: {1, now, the batch's fields and values}; {0, ms for which another driver has it}; {2}: the batch has ended;
--          {3}: there is none.
-- Retry: harmless.
local batch, now = prefix .. 'batch:' .. ARGV[1], now_ms()
local found = call('HMGET', batch, 'owner', 'until', 'status')
if not found[3] then
  return {3}
end
-- It has ended: only then it has an expiry.
if call('ZSCORE', prefix .. 'expiries', ARGV[1]) then
  return {2}
end
if found[1] ~= ARGV[2] and tonumber(found[2]) > now then
  return {0, found[2] - now}
end
although_full()
call('HSET', batch, 'owner', ARGV[3] == '0' and '' or ARGV[2], 'until', now + ARGV[3], 'waits', ARGV[4])
return {1, now, call('HGETALL', batch)}
