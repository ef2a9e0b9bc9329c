-- Change the status of a batch to the next one; the last one makes its files visible. Also when Redis is full.
-- Run by: batches.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] batch id, [2] the driver's token, [3] status before, [4] status, [5] ms until its files expire, once it has
--       ended, and [6] until it expires itself; then fields and values that are set
-- Returns: 1; 0: the driver has lost the lease; 2: the batch has another status than ARGV[3].
-- Retry: harmless: it finds the batch in the status that it has brought it to.
local id, status, now = ARGV[1], ARGV[4], now_ms()
local batch = prefix .. 'batch:' .. id
local found = call('HMGET', batch, 'status', 'input', 'output', 'errors')
if found[1] == status then
  return 1
end
if not drives(id, ARGV[2]) then
  return 0
end
if found[1] ~= ARGV[3] then
  return 2
end
although_full()
call('HSET', batch, 'status', status, 'at:' .. status, now, unpack(ARGV, 7))
if status == 'in_progress' or status == 'finalizing' then
  return 1
end
local time, expires = call('TIME'), now + ARGV[5]
for place, name in ipairs({'output', 'errors'}) do
  local file = found[2 + place]
  if file and call('EXISTS', prefix .. 'data:' .. file) == 1 then
    call('HSET', prefix .. 'file:' .. file, 'state', 'processed', 'purpose', 'batch_output', 'created', time[1],
      'name', id .. '_' .. name .. '.jsonl', 'expires', expires)
    call('ZADD', prefix .. 'files', time[1] * 1000000 + time[2], file)
    call('ZADD', prefix .. 'expiries', expires, file)
  else
    call('HDEL', batch, name)
  end
end
call('HSET', batch, 'owner', '', 'until', 0, 'waits', '')
call('HINCRBY', prefix .. 'file:' .. found[2], 'uses', -1)
call('UNLINK', prefix .. 'jobs:' .. id)
call('ZADD', prefix .. 'expiries', now + ARGV[6], id)
call('PEXPIRE', batch, ARGV[6]) -- also where its tenant holds no bytes any more, whom no sweep finds
return 1
