"""Broken variants of the scripts, each of which the model check has to catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from support.protocol.virtual_streams import SCRIPTS


class Mutant(NamedTuple):
    """One change of one script."""

    script: str
    sound: str
    broken: str

    def texts(self) -> Mapping[str, str]:
        """Return the broken text by script name. ValueError where the script no longer has `sound` exactly once."""
        text = SCRIPTS[self.script].text
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.script} has {self.sound!r} {text.count(self.sound)} times, not once")
        return {self.script: text.replace(self.sound, self.broken)}


MUTANTS = [
    Mutant("accept", "if known[1] then\n  although_full()", "if false then\n  although_full()"),
    Mutant("accept", "if known[1] then\n  although_full()", "if known[1] then"),
    Mutant("accept", "if known[3] and known[3] ~= tenant then", "if false then"),
    Mutant("accept", "requests + 1 > max_requests", "requests > max_requests"),
    Mutant("accept", "mine[1] + 1 > mine[3]", "false"),
    Mutant("accept", "    charge(class, tenant, tokens, weight)\n", ""),
    Mutant("accept", "enqueue(id, 'resume', tokens)", "enqueue(id, class, tokens)"),
    Mutant("accept", "call('ZADD', prefix .. 'deadlines', now + deadline, id)", ""),
    Mutant("accept", "call('ZADD', prefix .. 'gateways', now + lease, gateway)", ""),
    Mutant("append", "or state[2] ~= epoch or state[3] ~= nonce", ""),
    Mutant("append", "state[3] ~= nonce", "false"),
    Mutant("append", "if known < 0 then", "if false then"),
    Mutant("append", "if known > 0 and not repeats() then", "if false then"),
    Mutant("append", "known == count and repeats() and OK or ENDED", "OK or ENDED"),
    Mutant("append", "retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)", ""),
    Mutant("append", "  call('HINCRBY', req, 'others', 1)\n", ""),
    Mutant("claim", "call('HINCRBY', req, 'epoch', 1)", "tonumber(call('HGET', req, 'epoch'))"),
    Mutant("claim", "  call('XDEL', queue, best.entry)\n", ""),
    Mutant("claim", "  uncount(best.id, best.queue.name, best.tokens)\n", ""),
    Mutant("claim", "call('SADD', prefix .. 'owned:' .. engine, id)", ""),
    Mutant("claim", "call('ZADD', prefix .. 'leases', now + lease, engine)", ""),
    Mutant("claim", "'step', '', 'alone'", "'alone'"),
    Mutant("claim", "'from', found[3], ", ""),
    Mutant("claim", "local alone = idle and", "local alone ="),
    Mutant("claim", "control_is_over(now, control) and claim_suspect()", "claim_suspect()"),
    Mutant(
        "claim", "is_foreign = print ~= '' and fingerprint ~= '' and print ~= fingerprint\n", "is_foreign = false\n"
    ),
    Mutant("claim", "print == '' or fingerprint == '' or print == fingerprint, age", "true, age"),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint then", "if false then"),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint then", "if retired and tonumber(name) then"),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint then", "if retired and not tonumber(name) then"),
    Mutant("claim", "class and arrival + class * ageing", "class and arrival - class * ageing"),
    Mutant("claim", "or arrival - BEGUN", "or arrival"),
    Mutant("claim", "best.key > bound or", ""),
    Mutant("claim", "or one.key < other.key or", "or one.key > other.key or"),
    Mutant("end", "if not due or tonumber(due) > now_ms() then", "if not due then"),
    Mutant("end", "if state == 'finished' then", "if false then"),
    Mutant("end", "if call('XDEL', queue, found[6]) == 1 then", "if false then"),
    Mutant("end", "uncount(id, found[5], found[7])", ""),
    Mutant("end", "call('HSETNX', req, 'f' .. choice, reason) == 1", "true"),
    Mutant("end", "tenant ~= '' and tenant ~= found[2]", "false"),
    Mutant("end", "call('ZREM', prefix .. 'verdicts', id)", ""),
    Mutant("expire", "\n        requeue_after_death(id, engine, now, control)", "\n      requeue(id, engine)"),
    Mutant("expire", "    note_death(engine, now)\n", ""),
    Mutant("expire", "if engine == ARGV[1] or", "if true or"),
    Mutant("gateway_heartbeat", "call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])", ""),
    Mutant("gateway_heartbeat", "call('SCARD', prefix .. 'reads:' .. ARGV[1])", "0"),
    Mutant("hand_back", "and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2])", ""),
    Mutant("hand_back", "and found[2] == engine", ""),
    Mutant("hand_back", "    if died then", "    if true then"),
    Mutant("heartbeat", "call('ZADD', prefix .. 'leases', now + lease, engine)", ""),
    Mutant("heartbeat", "    take_back(id)\n", ""),
    Mutant("heartbeat", "or chosen and chosen ~= engine then", "then"),
    Mutant("heartbeat", "call('ZREM', prefix .. 'deaths', engine)", ""),
    Mutant("heartbeat", "tonumber(ARGV[8] or 0), tonumber(ARGV[7]), tonumber(ARGV[9]), now)", "0, 0, 0, now)"),
    Mutant("heartbeat", "local waits = call('ZREM', prefix .. 'suspects', id) +", "local waits ="),
    Mutant("leave", "if call('EXISTS', prefix .. 'owned:' .. ARGV[1]) == 0 then", "do"),
    Mutant("leave", "drop_lease(ARGV[1], now_ms())", ""),
    Mutant("mark", "found[1] == 'running' and found[2] == ARGV[i + 1] and found[3] == ARGV[i + 2]", "found[1]"),
    Mutant("mark", "call('HSET', req, 'step', ARGV[i + 3])", ""),
    Mutant("poll", "found[2] == 'finished'", "false"),
    Mutant("register", "if not finished then", "if true then"),
    Mutant("register", "  although_full()\n  add_reader", "  add_reader"),
    Mutant("register", "or found[1] ~= ARGV[2]", ""),
    Mutant("register", "call('ZADD', prefix .. 'gateways', now + ARGV[4], gateway)", ""),
    Mutant("register", "add_reader(id, found[3], gateway)", ""),
    Mutant("registry", "call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])", ""),
    Mutant("registry", "'(' .. now, '+inf'", "'-inf', now"),
    Mutant("revive", "if found[2] then", "if false then"),
    Mutant("revive", "if not found[1] then", "if false then"),
    Mutant("revive", "'others', index - tokens", "'others', 0"),
    Mutant("revive", "call('ZADD', prefix .. 'suspects', now, new)", ""),
    Mutant("sweep", "postpone('leases', lease)", ""),
    Mutant("sweep", "postpone('gateways', gateway_lease)\n  restart_graces(0)", "postpone('gateways', gateway_lease)"),
    Mutant("sweep", "or last[2] ~= run.id", ""),
    Mutant("sweep", "if call('XLEN', prefix .. 'queue:resume:' .. print) > 0 then", "if false then"),
    Mutant("forget", "add_queue('resume:' .. print)", ""),
    Mutant("sweep", "'deserted', 0", "'desert', 0"),
    Mutant("sweep", "elseif full then", "elseif false then"),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", "restart_graces(0)"),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", ""),
    Mutant("sweep", "    if not restarted then\n", "    if true then\n"),
    Mutant("sweep", "    note_death(engine, now)\n", ""),
    Mutant("sweep", "call('SADD', lapsed, id)", ""),
    Mutant("sweep", "\n    remove_reader(id, gateway, now)", ""),
    Mutant("sweep", "'silent', now + silence)", "'silent', now)"),
    Mutant("sweep", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now"),
    Mutant("unregister", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now"),
    Mutant("sweep", "storms(found[1] .. (found[3] or ''), found[2], now, window)", "false"),
    Mutant("sweep", "if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then", "if false then"),
    Mutant("unregister", "remove_reader(ARGV[i], ARGV[1], now)", ""),
    Mutant("view", "found[10] ~= ARGV[2]", "false"),
    # Of the prelude, as it stands before one of the scripts that use it.
    Mutant("append", "call('SREM', prefix .. 'owned:' .. engine, id)", ""),
    Mutant("end", "call('PEXPIRE', prefix .. 'log:' .. id, length)", ""),
    Mutant("end", "  call('ZREM', prefix .. 'deadlines', id)\n", ""),
    Mutant("expire", "if words(alone) >= CONDEMNED then", "if words(alone) > CONDEMNED then"),
    Mutant("expire", "words(found[6]) >= SUSPECT", "words(found[6]) > SUSPECT"),
    Mutant("expire", "local same = found[1] == found[5]", "local same = true"),
    Mutant("hand_back", "'nonce', '')\n  if found[5]", "'reason', '')\n  if found[5]"),
    Mutant("hand_back", "resume_queue(began and found[4] or '')", "resume_queue('')"),
    Mutant("register", "gateway, id)\n  call('ZREM', prefix .. 'graces', id)\n", "gateway, id)\n"),
    Mutant("sweep", "found[3] ~= '1' and (found[3] == '0' or", "found[3] ~= '1' and (false or"),
]
