-- Replace a model's card by one that was made from it.
-- Run by: admin/directory.py.
-- KEYS: the row.
-- ARGV: [1] digest of the card that it was made from, [2] the card, [3] its digest
-- Returns: 1; 0 where another card was published meanwhile, or the model was withdrawn, and nothing was written.
-- Retry: harmless, the digest differs then.
if call('HGET', KEYS[1], 'digest') ~= ARGV[1] then
  return 0
end
call('HSET', KEYS[1], 'card', ARGV[2], 'digest', ARGV[3])
return 1
