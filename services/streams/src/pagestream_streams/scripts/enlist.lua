-- Add a request to the list of its tenant's requests, which admin/broker.py reads.
--
-- The list is bounded by number, and expires after its tenant's last request. It may hold requests whose record is
-- gone: readers skip them, and take out those that are old.
-- Run by: admin/broker.py.
-- KEYS: the tenant's list, a sorted set: request ids by the time of their acceptance.
-- ARGV: [1] request id, [2] most requests in the list, [3] milliseconds for which the list is kept without a new one
-- Returns: 1.
-- Retry: harmless, a request that is listed keeps its time.
local list, time = KEYS[1], call('TIME')
call('ZADD', list, 'NX', time[1] * 1000000 + time[2], ARGV[1]) -- several may come in one millisecond
call('ZREMRANGEBYRANK', list, 0, -1 - tonumber(ARGV[2]))
call('PEXPIRE', list, ARGV[3])
return 1
