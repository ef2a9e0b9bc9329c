-- Take a gateway out of the readers of requests; where it was the last one, the disconnect grace starts.
-- Run by: gateway/readers.py.
-- KEYS: the prefix of the partition's keys, and a second name in its slot (see prelude.lua).
-- ARGV: [1] gateway id, [2...] request ids
-- Returns: 1.
-- Retry: harmless, a gateway that is no reader is not taken out again.
local now = now_ms()
although_full()
for i = 2, #ARGV do
  remove_reader(ARGV[i], ARGV[1], now)
end
return 1
