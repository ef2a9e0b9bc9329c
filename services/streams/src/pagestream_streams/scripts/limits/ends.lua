-- Read what requests of a partition used that have ended, and delete what is counted. One process at a time does it.
-- Run by: limits.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] the process, [2] ms for which others leave it the partition, [3] position after which to read ('-': the
--       begin), [4] most entries, [5...] positions of entries that are counted
-- Returns: entries of the stream `ended`, see note_usage in prelude.lua; none where another process is at it.
-- Retry: harmless.
local ended, now = prefix .. 'ended', now_ms()
although_full()
if #ARGV > 4 then
  call('XDEL', ended, unpack(ARGV, 5))
end
local found = call('HMGET', prefix .. 'meta', 'folder', 'folds_until')
local left = tonumber(found[2] or 0) - now
if found[1] ~= ARGV[1] and left > 0 and left <= tonumber(ARGV[2]) then
  return {}
end
call('HSET', prefix .. 'meta', 'folder', ARGV[1], 'folds_until', now + ARGV[2])
return call('XRANGE', ended, ARGV[3] == '-' and '-' or '(' .. ARGV[3], '+', 'COUNT', ARGV[4])
