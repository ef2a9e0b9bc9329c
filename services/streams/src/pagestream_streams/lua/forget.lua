-- Delete what a partition keeps beside its requests, once its model is unpublished and no request is unfinished.
--
-- Finished requests and their logs stay for their retention, quarantined ones likewise.
-- Run by: admin/unpublishing.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] retention of quarantined requests in ms
-- Returns: 1.
-- Retry: harmless, nothing is left to delete.
local known = call('HMGET', prefix .. 'meta', 'classes', 'prints')
local names = {'meta', 'gateways', 'graces', 'deadlines', 'deaths', 'alone', 'suspects', 'verdicts', 'vacating',
  'waited', 'queue:resume'}
for class in string.gmatch(known[1] or '', '%S+') do
  names[#names + 1] = 'queue:' .. class
  names[#names + 1] = 'tenants:' .. class
end
for print in string.gmatch(known[2] or '', '%S+') do
  names[#names + 1] = 'queue:resume:' .. print
end
for _, engine in ipairs(call('ZRANGE', prefix .. 'leases', 0, -1)) do
  names[#names + 1] = 'owned:' .. engine
  names[#names + 1] = 'lapsed:' .. engine
end
for _, gateway in ipairs(call('ZRANGE', prefix .. 'gateways', 0, -1)) do
  names[#names + 1] = 'reads:' .. gateway
end
names[#names + 1] = 'leases'
for _, name in ipairs(names) do
  call('DEL', prefix .. name)
end
call('PEXPIRE', prefix .. 'dead', ARGV[1])
return 1
