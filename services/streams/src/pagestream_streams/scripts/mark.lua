-- Record which requests are in an engine's running step, and which wait outside it.
-- Run by: engine/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: for each request: id, epoch, nonce, in the step (0 | 1; 2: it is new in a step that does not end)
-- Returns: 1.
-- Retry: harmless, the same marks are written again.
for i = 1, #ARGV, 4 do
  local req = prefix .. 'req:' .. ARGV[i]
  local found = call('HMGET', req, 'state', 'epoch', 'nonce')
  if found[1] == 'running' and found[2] == ARGV[i + 1] and found[3] == ARGV[i + 2] then
    call('HSET', req, 'step', ARGV[i + 3])
  end
end
return 1
