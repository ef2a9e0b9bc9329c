-- Delete the row of a model that is withdrawn.
-- Run by: admin/directory.py.
-- KEYS: the row.
-- Returns: 1; 0 where the model was published again meanwhile, and stays.
-- Retry: harmless, nothing is left to delete.
if call('HEXISTS', KEYS[1], 'card') == 1 then
  return 0
end
call('DEL', KEYS[1])
return 1
