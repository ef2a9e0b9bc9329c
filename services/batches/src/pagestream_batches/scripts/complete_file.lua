-- Complete a file: readers see it from now on.
-- Run by: files.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] file id, [2] its name, [3] its purpose, [4] ms until it expires
-- Returns: 1, or 0 where there is no such file.
-- Retry: harmless, it ends in the same way.
local file = prefix .. 'file:' .. ARGV[1]
local state = call('HGET', file, 'state')
if state ~= 'uploading' then
  return state == 'processed' and 1 or 0
end
local expires = now_ms() + ARGV[4]
call('HSET', file, 'state', 'processed', 'name', ARGV[2], 'purpose', ARGV[3], 'expires', expires)
call('ZADD', prefix .. 'expiries', expires, ARGV[1])
return 1
