-- Record which request runs a job.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] the driver's token, [3] number of its line, [4] its offset, bytes and request id
-- Returns: 1, or 0 where the driver has lost the lease.
-- Retry: harmless.
local jobs = prefix .. 'jobs:' .. ARGV[1]
if not drives(ARGV[1], ARGV[2]) then
  return 0
end
if call('HEXISTS', jobs, ARGV[3]) == 1 then
  call('HSET', jobs, ARGV[3], ARGV[4])
end
return 1
