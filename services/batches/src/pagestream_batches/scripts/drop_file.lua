-- Remove a file, also when Redis is full.
-- Run by: files.py.
-- KEYS: the prefix of the tenant's files and batches, and a second name in its slot (see prelude.lua).
-- ARGV: [1] file id, [2] "uploading": one that has not ended; "processed": one that readers see
-- Returns: {1, bytes held}; {0}: there is no such file; {2}: a batch that has not ended uses it.
-- Retry: harmless, but it finds no file.
local file = prefix .. 'file:' .. ARGV[1]
local found = call('HMGET', file, 'state', 'uses')
if found[1] ~= ARGV[2] then
  return {0}
end
if tonumber(found[2] or 0) > 0 then
  return {2}
end
drop_file(ARGV[1])
return {1, tonumber(call('GET', prefix .. 'held') or 0)}
