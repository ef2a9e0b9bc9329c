-- Append a part to a file that is not complete.
-- Run by: files.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] file id, [2] bytes before the part, [3] the part, [4] most bytes of the file, [5] of all of the tenant's
-- Returns: {1, bytes held}; {0}: there is no such file; {2}: the file would be too long; {3, bytes held}: the tenant's
--          files would take too much; {4, bytes}: the file has so many, not those of ARGV[2].
-- Retry: harmless, a part that is there is not appended again.
local MISSING, DONE, TOO_LARGE, FULL, ELSEWHERE = 0, 1, 2, 3, 4
local data, offset, part = prefix .. 'data:' .. ARGV[1], tonumber(ARGV[2]), ARGV[3]
if call('HGET', prefix .. 'file:' .. ARGV[1], 'state') ~= 'uploading' then
  return {MISSING}
end
local bytes, held = call('STRLEN', data), tonumber(call('GET', prefix .. 'held') or 0)
if #part > 0 and bytes == offset + #part then
  return {DONE, held}
end
if bytes ~= offset then
  return {ELSEWHERE, bytes}
end
if bytes + #part > tonumber(ARGV[4]) then
  return {TOO_LARGE}
end
if held + #part > tonumber(ARGV[5]) then
  return {FULL, held}
end
call('APPEND', data, part)
return {DONE, call('INCRBY', prefix .. 'held', #part)}
