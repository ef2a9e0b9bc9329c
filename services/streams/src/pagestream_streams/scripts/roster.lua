-- Renew an engine's row in the roster of engines that change their models, and read the roster.
-- Run by: admin/engine_models.py.
-- KEYS: the roster.
-- ARGV: [1] id of the process ('': only read), [2] its row ('': remove it), [3] time to live in ms, [4] the version
--   that the row was decided on ('': any), [5] the model that it serves ('': none), [6] the field of an order that is
--   done ('': none), [7] its value, as it was read: another one stays
-- Returns: whether the row was written, the version, the time, the roster's fields and values.
-- Retry: harmless. A row with a version is written once; what a second run reads has it.
local now = now_ms()
local roster, id = KEYS[1], ARGV[1]
local version = call('HGET', roster, 'version') or '0'
local is_written = 0
local function remove(field)
  call('HDEL', roster, field)
end
if id ~= '' then
  call('HDEL', roster, '') -- needs no memory: then the next write is admitted when Redis is full
end
local fields = call('HGETALL', roster)
for i = 1, #fields, 2 do
  local ends = string.match(fields[i + 1], '^(%d+) ')
  if string.sub(fields[i], 1, 7) == 'engine:' and ends and tonumber(ends) <= now then
    remove(fields[i])
  end
end
if id ~= '' and (ARGV[4] == '' or ARGV[4] == version) then
  is_written = 1
  if ARGV[2] == '' then
    remove('engine:' .. id)
  else
    call('HSET', roster, 'engine:' .. id, string.format('%.0f %s', now + ARGV[3], ARGV[2]))
  end
  if ARGV[4] ~= '' then
    version = call('HINCRBY', roster, 'version', 1)
  end
  if ARGV[5] ~= '' then
    call('HSET', roster, 'served:' .. ARGV[5], string.format('%.0f', now))
  end
end
if ARGV[6] ~= '' and call('HGET', roster, ARGV[6]) == ARGV[7] then
  remove(ARGV[6])
end
return {is_written, version, now, call('HGETALL', roster)}
