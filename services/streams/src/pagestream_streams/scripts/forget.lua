-- List requests of a partition that have not finished; where there are none, delete what it keeps beside its requests.
--
-- Finished requests and their logs stay for their retention, quarantined ones likewise. The key `removed` is the time
-- of the removal in ms: while it is there, accept.lua and revive.lua take nothing new. It is written first, so that a
-- gateway that still knows the model adds nothing after the list.
-- Run by: admin/sweeper.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] most ids, [2] retention of quarantined requests and of `removed` in ms ('' or none: only list)
-- Returns: the ids of those that wait, and of those that engines own.
-- Retry: harmless, nothing is left to delete.
local found, seen, most = {}, {}, tonumber(ARGV[1])
local known = call('HMGET', prefix .. 'meta', 'classes', 'prints')

local function add(id)
  local state = not seen[id] and #found < most and call('HGET', prefix .. 'req:' .. id, 'state')
  if state and state ~= 'finished' then
    found[#found + 1] = id
  end
  seen[id] = true
end

local names = {'meta', 'gateways', 'graces', 'deadlines', 'deaths', 'alone', 'suspects', 'verdicts', 'vacating',
  'waited', 'leases', 'fair', 'refusals', 'ended'}
local function add_queue(name)
  for _, entry in ipairs(call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', most)) do
    add(entry[2][2])
  end
  names[#names + 1] = 'queue:' .. name
end

add_queue('resume')
for class in string.gmatch(known[1] or '', '%S+') do
  add_queue(class)
  names[#names + 1] = 'tenants:' .. class
  names[#names + 1] = 'ranks:' .. class
end
for print in string.gmatch(known[2] or '', '%S+') do
  add_queue('resume:' .. print)
end
for _, key in ipairs({'suspects', 'verdicts'}) do
  for _, id in ipairs(call('ZRANGE', prefix .. key, 0, most - 1)) do
    add(id)
  end
end
for _, engine in ipairs(call('ZRANGE', prefix .. 'leases', 0, -1)) do
  for _, id in ipairs(call('SRANDMEMBER', prefix .. 'owned:' .. engine, most)) do
    add(id)
  end
  names[#names + 1] = 'owned:' .. engine
  names[#names + 1] = 'lapsed:' .. engine
end

local retention = ARGV[2] or ''
if retention ~= '' then
  although_full()
  call('SET', prefix .. 'removed', now_ms(), 'PX', retention)
end
if retention == '' or #found > 0 then
  return found
end
for _, gateway in ipairs(call('ZRANGE', prefix .. 'gateways', 0, -1)) do
  names[#names + 1] = 'reads:' .. gateway
end
for _, name in ipairs(names) do
  call('DEL', prefix .. name)
end
call('PEXPIRE', prefix .. 'dead', retention)
return found
