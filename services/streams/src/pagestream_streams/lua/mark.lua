-- An engine says which requests are in its running step, and which have left it to wait. Retry: harmless.
-- ARGV: for each request: id, epoch, nonce, in the step (0 | 1)
-- Returns nothing of use.
for i = 1, #ARGV, 4 do
  local req = prefix .. 'req:' .. ARGV[i]
  local found = call('HMGET', req, 'state', 'epoch', 'nonce')
  if found[1] == 'running' and found[2] == ARGV[i + 1] and found[3] == ARGV[i + 2] then
    call('HSET', req, 'step', ARGV[i + 3])
  end
end
return 1
