-- Reclaim at once all requests of an engine whose process is known to be dead.
-- Run by: admin/broker.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] engine id, or its name without the boot nonce, [2] doorbell channel, [3] partition number
--       [4] control time in ms (see prelude.lua)
-- Returns: the reclaimed ids.
-- Retry: harmless, nothing is left to reclaim.
local reclaimed, control, now = {}, tonumber(ARGV[4]), now_ms()
although_full()
for _, engine in ipairs(call('ZRANGE', prefix .. 'leases', 0, -1)) do
  if engine == ARGV[1] or string.sub(engine, 1, #ARGV[1] + 1) == ARGV[1] .. ':' then
    for _, id in ipairs(call('SMEMBERS', prefix .. 'owned:' .. engine)) do
      if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then
        requeue_after_death(id, engine, now, control)
        reclaimed[#reclaimed + 1] = id
      else
        disown(id, engine)
      end
    end
    note_death(engine, now)
    drop_lease(engine, now)
  end
end
if #reclaimed > 0 then
  call('PUBLISH', ARGV[2], ARGV[3])
end
return reclaimed
