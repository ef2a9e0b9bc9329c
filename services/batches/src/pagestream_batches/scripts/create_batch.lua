-- Create a batch over a file.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] id of the input file, [3] most batches of the tenant, [4] ms until it expires, [5] what its
--       gateways want to know of it
-- Returns: 1; 0: the tenant has as many batches as it may, and the oldest ten have not ended; 2: there is no such file;
--          3: the file is for something else.
-- Retry: harmless, a batch that is there stays as it is.
local batch, file, now = prefix .. 'batch:' .. ARGV[1], prefix .. 'file:' .. ARGV[2], now_ms()
if call('EXISTS', batch) == 1 then
  return 1
end
local found = call('HMGET', file, 'state', 'purpose', 'expires')
if found[1] ~= 'processed' or tonumber(found[3]) <= now then
  return 2
end
if found[2] ~= 'batch' then
  return 3
end
if call('ZCARD', prefix .. 'batches') >= tonumber(ARGV[3]) then
  local ended
  for _, id in ipairs(call('ZRANGE', prefix .. 'batches', 0, 9)) do
    ended = ended or call('ZSCORE', prefix .. 'expiries', id) and id
  end
  if not ended then
    return 0
  end
  drop_batch(ended)
end
call('HSET', batch, 'status', 'validating', 'input', ARGV[2], 'about', ARGV[5], 'at:created', now,
  'at:expires', now + ARGV[4], 'offset', 0, 'line', 0, 'total', 0, 'completed', 0, 'failed', 0, 'owner', '', 'until', 0)
call('HINCRBY', file, 'uses', 1)
local time = call('TIME')
call('ZADD', prefix .. 'batches', time[1] * 1000000 + time[2], ARGV[1])
return 1
