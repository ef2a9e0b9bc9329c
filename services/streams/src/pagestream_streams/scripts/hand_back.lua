-- Hand requests back at their position: return what an engine owns to the queues.
-- Run by: engine/session.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id, [2] doorbell channel, [3] partition number
--       [4] why ('stop'; 'failed': the engine broke in its running step, which counts as its death)
--       [5] control time in ms (see prelude.lua)
--       [6...] for each request: id, epoch, nonce ('' and '': any claim of this engine)
-- Returns: the ids that were handed back.
-- Retry: harmless, only what the engine still owns is moved.
local engine, died, control, now, back = ARGV[1], ARGV[4] == 'failed', tonumber(ARGV[5]), now_ms(), {}
although_full()
for i = 6, #ARGV, 3 do
  local id = ARGV[i]
  local found = call('HMGET', prefix .. 'req:' .. id, 'state', 'owner', 'epoch', 'nonce')
  if found[1] == 'running' and found[2] == engine
    and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2]) then
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
