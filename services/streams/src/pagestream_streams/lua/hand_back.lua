-- An engine gives requests back with their position. Retry: harmless, only what the engine still owns is moved.
-- ARGV: engine id, doorbell channel, partition number, then for each request: id, epoch, nonce ('' and '': whatever claim it is)
-- Returns the ids that were handed back.
local engine, back = ARGV[1], {}
for i = 4, #ARGV, 3 do
  local id = ARGV[i]
  local found = call('HMGET', prefix .. 'req:' .. id, 'state', 'owner', 'epoch', 'nonce')
  if found[1] == 'running' and found[2] == engine and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2]) then
    requeue(id, engine)
    back[#back + 1] = id
  elseif found[2] ~= engine then
    disown(id, engine)
  end
end
if #back > 0 then
  call('PUBLISH', ARGV[2], ARGV[3])
end
return back
