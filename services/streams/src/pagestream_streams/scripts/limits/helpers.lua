-- Helpers of the scripts on what a tenant uses; they come between prelude.lua and each of these.
--
-- KEYS[1] is the prefix of one tenant's keys, "<key prefix>:limits:{<tag>}:". A scope is a credential of the tenant, or
-- '' for the tenant as a whole.
--   window:<kind>:<scope>  a hash: what was counted in each slot of time, and their sum
--   held                   a hash: request id -> "<reserved at, ms> <tokens> <prompt tokens> <stage> <tries> <places of
--                          the windows in which it counts, or -> <credential>"
--   open                   a sorted set of the same ids, by when they were last looked up
--   state                  a hash: running:<scope> (requests), queued:<scope> (prompt tokens), run_ms (how long its
--                          requests took, a moving average), and folded:<partition> (see fold.lua)
--   ended                  a sorted set: ids of requests that were counted as ended, for a while
--   usage:<h|d>:<number>   hashes: what was used in an hour, in a day

-- A kind of window: {name, slots, ms of a slot}. What is counted leaves with its slot, so that it stays for at least
-- the window's length, and at most one slot longer: in no stretch of that length more is counted than the limit.
local REQUESTS, TOKENS, DAY = {'requests', 60, 1000}, {'tokens', 60, 1000}, {'day', 96, 900000}
local WINDOWS = {REQUESTS, TOKENS, DAY}
local PER_SCOPE = 5 -- limits: those of the windows, of running requests, of queued prompt tokens

-- Slots by which a clock may be behind the one before, as that of a replica that took over: until it has caught up,
-- what is counted goes to the newest slot.
local MOST_BEHIND = 5

-- Opens a window: drops the slots that have left it. One whose newest slot lies farther ahead of the clock, which was
-- set back, begins anew. Returns {key, slot of now, oldest slot that may be there, newest slot, sum, kind}.
local function open_window(kind, scope, now)
  local key, slot = prefix .. 'window:' .. kind[1] .. ':' .. scope, math.floor(now / kind[3])
  local found = call('HMGET', key, 'sum', 'first', 'last')
  local newest = tonumber(found[3] or slot)
  slot = newest - slot <= MOST_BEHIND and math.max(slot, newest) or slot
  local sum, first, last = tonumber(found[1] or 0), tonumber(found[2] or slot), tonumber(found[3] or slot)
  if found[3] and (last > slot or last < slot - kind[2]) then
    call('DEL', key)
    sum, first, last = 0, slot, slot
  elseif first < slot - kind[2] then
    local left, names = 0, {}
    for each = first, slot - kind[2] - 1 do
      names[#names + 1] = each
    end
    for _, amount in ipairs(call('HMGET', key, unpack(names))) do
      left = left + tonumber(amount or 0)
    end
    call('HDEL', key, unpack(names))
    sum, first = sum - left, slot - kind[2]
    call('HSET', key, 'sum', sum, 'first', first)
  end
  return {key = key, slot = slot, first = first, last = last, sum = sum, kind = kind}
end

-- Counts an amount in the slot of a time, 0 or more in all. What has left the window stays as it is.
local function count(window, slot, amount)
  local kind = window.kind
  if amount == 0 or slot < window.slot - kind[2] or slot > window.slot then
    return
  end
  if amount < 0 then
    amount = -math.min(-amount, tonumber(call('HGET', window.key, slot) or 0))
    if amount == 0 then
      return
    end
  end
  if call('HINCRBY', window.key, slot, amount) == 0 then
    call('HDEL', window.key, slot)
  end
  window.sum, window.first = window.sum + amount, math.min(window.first, slot)
  if amount > 0 then
    window.last = math.max(window.last, slot)
  end
  call('HSET', window.key, 'sum', window.sum, 'first', window.first, 'last', window.last)
  call('PEXPIRE', window.key, (kind[2] + 2) * kind[3])
end

-- Ms until a slot leaves the window.
local function leaves_in(window, slot, now)
  return (slot + window.kind[2] + 1) * window.kind[3] - now
end

-- Ms until so much has left a window; nothing where it never had it.
local function frees_in(window, amount, now)
  local names = {}
  for slot = window.first, window.slot do
    names[#names + 1] = slot
  end
  for place, found in ipairs(call('HMGET', window.key, unpack(names))) do
    amount = amount - tonumber(found or 0)
    if amount <= 0 then
      return leaves_in(window, names[place], now)
    end
  end
end

-- Stages of a reservation: an engine may not have it yet; one has it; it has ended, and its usage is not counted yet.
local QUEUED, CLAIMED, ENDED = '0', '1', '2'

-- A reservation in its parts; nothing where there is none.
local function read_held(id)
  local at, tokens, prompt, stage, tries, places, key =
    string.match(call('HGET', prefix .. 'held', id) or '', '^(%d+) (%d+) (%d+) (%d) (%d+) (%S+) (.*)$')
  return at and {at = tonumber(at), tokens = tonumber(tokens), prompt = tonumber(prompt), stage = stage,
    tries = tonumber(tries), places = places, key = key}
end

local function write_held(id, held)
  call('HSET', prefix .. 'held', id, string.format('%.0f %.0f %.0f %s %.0f %s %s', held.at, held.tokens,
    held.prompt, held.stage, held.tries, held.places, held.key))
end

-- The scopes of a reservation: its tenant, and its credential.
local function scopes_of(key)
  return key == '' and {''} or {'', key}
end

local function add_state(name, scope, amount)
  if amount ~= 0 and call('HINCRBY', prefix .. 'state', name .. ':' .. scope, amount) <= 0 then
    call('HDEL', prefix .. 'state', name .. ':' .. scope)
  end
end

-- Moves a reservation on to a later stage.
local function advance(id, held, stage)
  for _, scope in ipairs(scopes_of(held.key)) do
    if held.stage == QUEUED then
      add_state('queued', scope, -held.prompt)
    end
    if held.stage ~= ENDED and stage == ENDED then
      add_state('running', scope, -1)
    end
  end
  held.stage = stage
end

local function forget_held(id, held)
  advance(id, held, ENDED)
  call('ZREM', prefix .. 'open', id)
  call('HDEL', prefix .. 'held', id)
end

-- Sets what a reservation counts to `tokens`: what is less leaves the slots in which it was reserved, what is more is
-- counted now. `requests`: 0, or -1 where there was no request.
local function settle(held, tokens, requests, now)
  for number, scope in ipairs(scopes_of(held.key)) do
    for place, kind in ipairs(WINDOWS) do
      local amount = kind == REQUESTS and requests or tokens - held.tokens
      if amount ~= 0 and string.find(held.places, (number - 1) * PER_SCOPE + place, 1, true) then
        local window = open_window(kind, scope, now)
        count(window, amount < 0 and math.floor(held.at / kind[3]) or window.slot, amount)
      end
    end
  end
end
