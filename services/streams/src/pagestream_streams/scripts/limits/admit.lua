-- Reserve what a request may use of what its tenant and its credential may use: all of it, or nothing.
--
-- In each window what was admitted, and what ended requests used beyond it, is at most the limit; what a request didn't
-- use is given back when it ends. A request counts as running from here to its end, and its prompt as queued until an
-- engine has it: note.lua and fold.lua learn that.
-- Run by: limits.py.
-- KEYS: the prefix of the tenant's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] request id, [2] the credential ('': none), [3] prompt tokens, [4] tokens to reserve
--       [5] whether limits may refuse it (0: it was accepted before, and Redis lost it)
--       [6] ms after which a reservation is looked up again, [7] likewise where a limit of what runs refuses
--       [8] most ids to look up, [9] ms until the keys expire
--       [10...14] the tenant's limits: requests and tokens a minute, tokens a day, running requests, queued prompt
--       tokens (0: none); [15...19] the credential's
-- Returns: {1, by what it is given back, rows, ids to look up}: the number of its try while no other shares it, else 0.
--          {0, place of the limit in [10...19], what counts there, ms until the request fits (-1: never), rows, ids to
--          look up}. Rows: {place of the limit, what counts there, ms until nothing counts}... of limits with a window;
--          {place, what counts there, -1} of running requests.
-- Retry: harmless, a request has one reservation. It counts as shared then, and is found by looking it up.
local id, key, prompt, tokens, bounded = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local now, FIRST_LIMIT = now_ms(), 10
local DEFAULT_RUN_MS = 1000

-- Ids that were last looked up `age` ago, and count as looked up now.
local function due(age)
  local found = call('ZRANGEBYSCORE', prefix .. 'open', '-inf', now - age, 'LIMIT', 0, ARGV[8])
  for _, each in ipairs(found) do
    call('ZADD', prefix .. 'open', now, each)
  end
  return found
end

local windows, rows, refusal = {}, {}, nil
local function refuse(place, used, wait)
  local is_worse = not refusal or wait < 0 or refusal[4] >= 0 and wait > refusal[4]
  if is_worse then
    refusal = {0, place, used, wait}
  end
end

local known = read_held(id)
local is_known = known or call('ZSCORE', prefix .. 'ended', id)
local running = call('HMGET', prefix .. 'state', 'running:', 'queued:', 'running:' .. key, 'queued:' .. key, 'run_ms')
local run_ms = tonumber(running[5] or DEFAULT_RUN_MS)

for number, scope in ipairs(scopes_of(key)) do
  local base = (number - 1) * PER_SCOPE
  local function limit_of(place)
    return tonumber(ARGV[FIRST_LIMIT - 1 + base + place])
  end
  for place, kind in ipairs(WINDOWS) do
    local limit, amount = limit_of(place), kind == REQUESTS and 1 or tokens
    if limit > 0 then
      local window = open_window(kind, scope, now)
      windows[#windows + 1] = {window, amount, base + place}
      if amount > limit then
        refuse(base + place, window.sum, -1)
      elseif window.sum + amount > limit then
        refuse(base + place, window.sum, frees_in(window, window.sum + amount - limit, now) or -1)
      end
    end
  end
  local num_running, queued = tonumber(running[2 * number - 1] or 0), tonumber(running[2 * number] or 0)
  if limit_of(4) > 0 then
    if num_running + 1 > limit_of(4) then
      refuse(base + 4, num_running, math.ceil(run_ms / num_running))
    end
    rows[#rows + 1] = {base + 4, num_running, -1}
  end
  if limit_of(5) > 0 and prompt > limit_of(5) then
    refuse(base + 5, queued, -1)
  elseif limit_of(5) > 0 and queued + prompt > limit_of(5) then
    refuse(base + 5, queued, math.ceil(run_ms * (queued + prompt - limit_of(5)) / queued))
  end
end

local is_refused = refusal and bounded and not is_known
if not is_refused and not is_known then
  local places = ''
  for _, each in ipairs(windows) do
    count(each[1], each[1].slot, each[2])
    places = places .. each[3]
  end
  for _, scope in ipairs(scopes_of(key)) do
    add_state('running', scope, 1)
    add_state('queued', scope, prompt)
  end
  for _, row in ipairs(rows) do
    row[2] = row[2] + 1
  end
  write_held(id, {at = now, tokens = tokens, prompt = prompt, stage = QUEUED, tries = 1,
    places = places == '' and '-' or places, key = key})
  call('ZADD', prefix .. 'open', now, id)
  for _, name in ipairs({'held', 'open', 'state'}) do
    call('PEXPIRE', prefix .. name, ARGV[9])
  end
elseif known then
  known.tries = known.tries + 1
  write_held(id, known)
end
for _, each in ipairs(windows) do
  local window, place = each[1], each[3]
  rows[#rows + 1] = {place, window.sum, window.sum > 0 and leaves_in(window, window.last, now) or 0}
end
if is_refused then
  local of_what_runs = (refusal[2] - 1) % PER_SCOPE + 1 > #WINDOWS
  refusal[5], refusal[6] = rows, due(tonumber(of_what_runs and ARGV[7] or ARGV[6]))
  return refusal
end
return {1, is_known and 0 or 1, rows, due(tonumber(ARGV[6]))}
