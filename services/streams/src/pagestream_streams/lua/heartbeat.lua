-- Renews an engine's lease in this partition where it owns something. Retry: harmless.
-- ARGV: engine id, lease in ms
-- Returns the ids that it owns.
local owned = call('SMEMBERS', prefix .. 'owned:' .. ARGV[1])
if #owned > 0 then
  call('ZADD', prefix .. 'leases', now_ms() + ARGV[2], ARGV[1])
end
return owned
