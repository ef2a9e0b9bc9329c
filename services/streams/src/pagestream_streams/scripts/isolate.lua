-- Publish in a partition that an engine runs a suspect isolated, or that it no longer does.
--
-- It works when Redis is full: a suspect is claimed then as well.
-- Run by: engine/claim.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id, [2] request id ('': none any more)
-- Returns: 1.
-- Retry: harmless, the same is written again.
although_full()
if ARGV[2] == '' then
  call('HDEL', prefix .. 'alone', ARGV[1])
else
  call('HSET', prefix .. 'alone', ARGV[1], ARGV[2])
end
return 1
