-- List requests of a partition that have not finished: those that wait, and those that engines own.
-- Run by: admin/unpublishing.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] most ids
-- Returns: the ids.
-- Retry: harmless, it only reads.
local found, seen, most = {}, {}, tonumber(ARGV[1])
local known = call('HMGET', prefix .. 'meta', 'classes', 'prints')

local function add(id)
  local state = not seen[id] and #found < most and call('HGET', prefix .. 'req:' .. id, 'state')
  if state and state ~= 'finished' then
    found[#found + 1] = id
  end
  seen[id] = true
end

local function add_queue(name)
  for _, entry in ipairs(call('XRANGE', prefix .. 'queue:' .. name, '-', '+', 'COUNT', most)) do
    add(entry[2][2])
  end
end

add_queue('resume')
for class in string.gmatch(known[1] or '', '%S+') do
  add_queue(class)
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
end
return found
