-- Append the line of a job that has ended to the batch's output or errors, once.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] the driver's token, [3] number of the job's line, [4] "output" or "errors", [5] the line,
--       [6] most bytes of a file, [7] prompt tokens, [8] of them cached, [9] generated tokens
-- Returns: {1, bytes held}; {0}: the driver has lost the lease; {2}: the file would be too long.
-- Retry: harmless, a job has one line. The append comes first: a full Redis refuses it, and nothing has happened.
local batch, jobs = prefix .. 'batch:' .. ARGV[1], prefix .. 'jobs:' .. ARGV[1]
if not drives(ARGV[1], ARGV[2]) then
  return {0}
end
if call('HEXISTS', jobs, ARGV[3]) == 0 then
  return {1, tonumber(call('GET', prefix .. 'held') or 0)}
end
local data = prefix .. 'data:' .. call('HGET', batch, ARGV[4])
if call('STRLEN', data) + #ARGV[5] > tonumber(ARGV[6]) then
  return {2}
end
call('APPEND', data, ARGV[5])
call('HDEL', jobs, ARGV[3])
call('HINCRBY', batch, ARGV[4] == 'output' and 'completed' or 'failed', 1)
for i, name in ipairs({'prompt_tokens', 'cached_tokens', 'output_tokens'}) do
  call('HINCRBY', batch, name, ARGV[6 + i])
end
return {1, call('INCRBY', prefix .. 'held', #ARGV[5])}
