-- Takes a living engine that ends out of the leases, unless it still owns something: then its lease has to lapse. Retry: harmless.
-- ARGV: engine id
-- Returns nothing of use.
although_full()
call('HDEL', prefix .. 'alone', ARGV[1])
if call('EXISTS', prefix .. 'owned:' .. ARGV[1]) == 0 then
  drop_lease(ARGV[1], now_ms())
end
return 1
