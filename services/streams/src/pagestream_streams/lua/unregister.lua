-- Takes a gateway out of the readers of requests; the grace of those that nobody reads starts. Retry: harmless.
-- ARGV: gateway id, ids
-- Returns nothing of use.
local now = now_ms()
although_full()
for i = 2, #ARGV do
  remove_reader(ARGV[i], ARGV[1], now)
end
return 1
