-- Record the next lines of a batch's file as its jobs.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] the driver's token, [3] most bytes of the tenant's files, while which are held no job
--       starts (0: any), [4] offset behind the lines in the file; then for each line its number, offset and bytes
-- Returns: 1; 0: the driver has lost the lease; 2: the tenant's files take too much.
-- Retry: harmless, jobs that were started are not started again, nor those of a driver that began too early in the file.
local batch, jobs = prefix .. 'batch:' .. ARGV[1], prefix .. 'jobs:' .. ARGV[1]
if not drives(ARGV[1], ARGV[2]) then
  return 0
end
if tonumber(ARGV[3]) > 0 and tonumber(call('GET', prefix .. 'held') or 0) >= tonumber(ARGV[3]) then
  return 2
end
local before = tonumber(call('HGET', batch, 'offset'))
if before >= tonumber(ARGV[4]) then
  return 1
end
local started = {}
for i = 5, #ARGV, 3 do
  if tonumber(ARGV[i + 1]) >= before then
    started[#started + 1] = ARGV[i]
    started[#started + 1] = ARGV[i + 1] .. ' ' .. ARGV[i + 2]
  end
end
if #started > 0 then
  call('HSET', jobs, unpack(started))
end
call('HSET', batch, 'offset', ARGV[4], 'line', ARGV[#ARGV - 2])
return 1
