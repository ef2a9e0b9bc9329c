-- Ask for the end of a batch, also when Redis is full.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id
-- Returns: 1; 0: there is no such batch; 2: it has ended.
-- Retry: harmless.
local batch = prefix .. 'batch:' .. ARGV[1]
local status = call('HGET', batch, 'status')
if not status then
  return 0
end
-- A batch gets an expiry when it ends, see change_status.lua.
if call('ZSCORE', prefix .. 'expiries', ARGV[1]) then
  return 2
end
if status ~= 'cancelling' then
  although_full()
  call('HSET', batch, 'status', 'cancelling', 'at:cancelling', now_ms())
end
return 1
