"""The protocol's real scripts on a real Redis, with a clock, expiries and a process identity that a test moves.

Only `call` is wrapped: TIME, INFO, expiries and `XADD *` look at the test's clock instead of the server's. Everything
else runs as it is shipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagestream_streams import scripts
from pagestream_streams.scripts import Script
from redis import Redis, RedisError

PREFIX = "ps:{test/model/0}:"
REGISTRY_KEY = "ps:engines:test/model"
BELL = "ps:bell:test/model"

SCRIPTS: Mapping[str, Script] = {each.name: each for each in vars(scripts).values() if isinstance(each, Script)}

_SHIPPED = "local call, prefix = redis.call, KEYS[1]"
# KEYS[2] is the clock in ms, KEYS[3] the identity of the server's process.
_VIRTUAL = """
local prefix = KEYS[1]
local function call(name, ...)
  local given = {...}
  if name == 'TIME' then
    return {math.floor(KEYS[2] / 1000), KEYS[2] % 1000 * 1000}
  elseif name == 'INFO' then
    return 'run_id:' .. KEYS[3]
  elseif name == 'PEXPIRE' then
    return redis.call('EXISTS', given[1]) == 1 and redis.call('ZADD', 'expiries', KEYS[2] + given[2], given[1]) or 0
  elseif name == 'SET' and given[3] == 'PX' then
    redis.call('ZADD', 'expiries', KEYS[2] + given[4], given[1])
    return redis.call('SET', given[1], given[2])
  elseif name == 'DEL' then
    redis.call('ZREM', 'expiries', given[1])
  elseif name == 'XADD' then
    local at = given[2] == 'MAXLEN' and 5 or 2
    if given[at] == '*' then
      local last, ms, count = '0-0', tonumber(KEYS[2]), 0
      if redis.call('EXISTS', given[1]) == 1 then
        local info = redis.call('XINFO', 'STREAM', given[1])
        for i = 1, #info, 2 do
          if info[i] == 'last-generated-id' then
            last = info[i + 1]
          end
        end
      end
      local last_ms, last_count = string.match(last, '(%d+)-(%d+)')
      if tonumber(last_ms) >= ms then
        ms, count = tonumber(last_ms), last_count + 1
      end
      given[at] = string.format('%d-%d', ms, count)
    end
  end
  return redis.call(name, unpack(given))
end
"""
_CONTENT = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, value = redis.call('TYPE', key).ok, nil
  if kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'stream' then
    value = {redis.call('XRANGE', key, '-', '+'), 0}
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      for i = 1, #group, 2 do
        if group[i] == 'pending' then value[2] = group[i + 1] end
      end
    end
  else value = redis.call('GET', key) end
  all[#all + 1] = {key, kind, value}
end
return all
"""
_DUMP = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  all[#all + 1] = key
  all[#all + 1] = redis.call('DUMP', key)
end
return all
"""
_RESTORE = """
redis.call('FLUSHALL')
for i = 1, #ARGV, 2 do redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
return 1
"""

Content = dict[str, Any]
Dump = Sequence[bytes]


def virtual(text: str) -> str:
    """Return a script with the test's clock. ValueError where the prelude has no line that can be replaced."""
    if _SHIPPED not in text:
        raise ValueError(f"the prelude no longer has the line {_SHIPPED!r}: change it here as well")
    return text.replace(_SHIPPED, _VIRTUAL)


class VirtualStreams:
    """One partition. `broken`: texts that replace scripts, by name."""

    def __init__(self, client: Redis, broken: Mapping[str, str] | None = None) -> None:
        self._client = client
        texts = {name: script.text for name, script in SCRIPTS.items()} | dict(broken or {})
        self._sha = {name: str(client.script_load(virtual(text))) for name, text in texts.items()}
        self._content, self._dump, self._restore = (
            str(client.script_load(text)) for text in (_CONTENT, _DUMP, _RESTORE)
        )
        client.flushall()

    def run(self, name: str, arguments: Sequence[Any], now: int, run_id: str, *, full: bool = False) -> Any:
        """Run a script; raise redis' ResponseError where it fails. `full`: Redis is at its memory limit meanwhile."""
        key = REGISTRY_KEY if name == "registry" else PREFIX
        if full:
            self._client.config_set("maxmemory", 1)
        try:
            reply = text_of(self._client.evalsha(self._sha[name], 3, key, str(now), run_id, *arguments))
        finally:
            if full:
                self._client.config_set("maxmemory", 0)
        if SCRIPTS[name].num_arguments is not None:
            [reply] = reply
            if isinstance(reply, RedisError):
                raise reply
        return reply

    def unlist(self, engine: str) -> None:
        """Remove an engine from the registry."""
        self._client.zrem(REGISTRY_KEY, engine)

    def expire(self, now: int) -> None:
        """Delete the keys whose expiry has come."""
        for key in cast(list[bytes], self._client.zrangebyscore("expiries", "-inf", now)):
            self._client.delete(key)
            self._client.zrem("expiries", key)

    def content(self) -> Content:
        """Return all keys without their prefix, in a form that is independent of the order of writes."""
        result: Content = {}
        for key, kind, value in text_of(self._client.evalsha(self._content, 0)):
            result[key.removeprefix(PREFIX)] = _canonical(kind, value)
        return result

    def dump(self) -> Dump:
        """Dump all keys, for `restore`."""
        found: Dump = self._client.evalsha(self._dump, 0)
        return found

    def restore(self, dump: Dump) -> None:
        """Restore the state of a `dump`."""
        self._client.evalsha(self._restore, 0, *dump)


def text_of(reply: Any) -> Any:
    if isinstance(reply, bytes):
        return reply.decode()
    if isinstance(reply, list):
        return [text_of(each) for each in reply]
    return reply


def _canonical(kind: str, value: Any) -> Any:
    if kind == "hash":
        return dict(sorted(zip(value[::2], value[1::2], strict=True)))
    if kind == "set":
        return sorted(value)
    if kind == "zset":
        return {member: float(score) for member, score in sorted(zip(value[::2], value[1::2], strict=True))}
    if kind == "stream":
        entries, pending = value
        rows = [(row[0], dict(zip(row[1][::2], row[1][1::2], strict=True))) for row in entries]
        return {"rows": rows, "pending": pending}
    return value
