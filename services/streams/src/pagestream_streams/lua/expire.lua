-- Reclaims at once what an engine owns that is known to be dead. Retry: harmless.
-- ARGV: engine id, or its name without the boot nonce; doorbell channel; partition number; control time in ms
-- Returns the reclaimed ids.
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
