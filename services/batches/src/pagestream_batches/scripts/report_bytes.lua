-- Record what a tenant's files take, and return what those of all tenants take together.
-- Run by: files.py.
-- KEYS: a hash of bytes by tenant tag; its field "" is their sum.
-- ARGV: [1] tenant tag, [2] bytes
-- Returns: bytes of all tenants.
-- Retry: harmless, it sets what was read. A report that comes late is corrected by the tenant's next one.
local before = tonumber(call('HGET', KEYS[1], ARGV[1]) or 0)
call('HDEL', KEYS[1], ARGV[1]) -- needs no memory, so that the others work when Redis is full
if ARGV[2] ~= '0' then
  call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
return call('HINCRBY', KEYS[1], '', ARGV[2] - before)
