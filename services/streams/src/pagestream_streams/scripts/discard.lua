-- Let a finished request's record and log expire soon, and mark it, so that views say so at once.
--
-- They are not deleted: a gateway that reads the log would take it for lost, and accept the request again.
-- Run by: admin/broker.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] tenant, [3] ms until they expire
-- Returns: 1; 0 where the tenant has no such request, or it has not finished.
-- Retry: harmless, they expire no later than by the first run.
local req, log = prefix .. 'req:' .. ARGV[1], prefix .. 'log:' .. ARGV[1]
local found = call('HMGET', req, 'state', 'tenant')
if found[1] ~= 'finished' or found[2] ~= ARGV[2] then
  return 0
end
although_full()
for _, key in ipairs({req, log}) do
  if call('PTTL', key) > tonumber(ARGV[3]) then
    call('PEXPIRE', key, ARGV[3])
  end
end
call('HSET', req, 'discarded', '1')
return 1
