-- An engine gives requests back with their position. Retry: harmless, only what the engine still owns is moved.
-- ARGV: engine id, doorbell channel, partition number, why ('stop'; 'failed': the engine broke in its running step, which is a death), control
--       time in ms, then for each request: id, epoch, nonce ('' and '': whatever claim it is)
-- Returns the ids that were handed back.
local engine, died, control, now, back = ARGV[1], ARGV[4] == 'failed', tonumber(ARGV[5]), now_ms(), {}
although_full()
for i = 6, #ARGV, 3 do
  local id = ARGV[i]
  local found = call('HMGET', prefix .. 'req:' .. id, 'state', 'owner', 'epoch', 'nonce')
  if found[1] == 'running' and found[2] == engine and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2]) then
    if died then
      requeue_after_death(id, engine, now, control)
    else
      requeue(id, engine)
    end
    back[#back + 1] = id
  elseif found[2] ~= engine then
    disown(id, engine)
  end
end
if died then
  note_death(engine, now)
end
if #back > 0 then
  call('PUBLISH', ARGV[2], ARGV[3])
end
return back
