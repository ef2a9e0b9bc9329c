-- Note what became of requests with a reservation, as their partitions say.
-- Run by: limits.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] ms that an accept may take: a younger reservation without a request is left; then for each request its id
--       and what it is: 'none' (there is no such request), 'queued', 'claimed', 'ended', 'past' (ended long ago), or
--       'refused' (its one try was)
-- Returns: how many of them had a reservation that no longer counts as running, or as queued.
-- Retry: harmless.
local now, moved = now_ms(), 0
although_full()
for i = 2, #ARGV, 2 do
  local id, what = ARGV[i], ARGV[i + 1]
  local held = read_held(id)
  if not held then
    call('ZREM', prefix .. 'open', id)
  elseif what == 'refused' and held.tries == 1 or what == 'none' and age(held.at, now) >= tonumber(ARGV[1]) then
    if held.stage ~= ENDED then
      settle(held, 0, -1, now)
      moved = moved + 1
    end
    forget_held(id, held)
  elseif what == 'claimed' and held.stage == QUEUED then
    advance(id, held, CLAIMED)
    write_held(id, held)
    moved = moved + 1
  elseif what == 'ended' and held.stage ~= ENDED then
    advance(id, held, ENDED)
    write_held(id, held)
    moved = moved + 1
  elseif what == 'past' then
    forget_held(id, held) -- ended by an engine of a version that writes no usage: it counts as it was reserved
  end
end
return moved
