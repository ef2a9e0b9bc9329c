-- Create a file of a tenant, which readers do not see before complete_file.lua. See prelude.lua for the keys.
-- Run by: files.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] file id, [2] ms until it is removed unless it is ended, [3] most files of the tenant
-- Returns: 1, or 0 where the tenant has as many files as it may.
-- Retry: harmless, a file that has begun stays as it is.
local id, file, time = ARGV[1], prefix .. 'file:' .. ARGV[1], call('TIME')
if call('EXISTS', file) == 1 then
  return 1
end
sweep_files(now_ms())
if call('ZCARD', prefix .. 'files') >= tonumber(ARGV[3]) then
  return 0
end
call('HSET', file, 'state', 'uploading', 'created', time[1])
call('ZADD', prefix .. 'files', time[1] * 1000000 + time[2], id)
call('ZADD', prefix .. 'expiries', now_ms() + ARGV[2], id)
return 1
