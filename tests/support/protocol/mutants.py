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
    walk: int = 0
    """Seed of a walk that catches it, tried before others."""

    def texts(self) -> Mapping[str, str]:
        """Return the broken text by script name. ValueError where the script no longer has `sound` exactly once."""
        text = SCRIPTS[self.script].text
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.script} has {self.sound!r} {text.count(self.sound)} times, not once")
        return {self.script: text.replace(self.sound, self.broken)}


MUTANTS = [
    Mutant("accept", "if known[1] then\n  although_full()", "if false then\n  although_full()"),
    Mutant("accept", "if known[1] then\n  although_full()", "if known[1] then", walk=28),
    Mutant("accept", "if known[3] and known[3] ~= tenant then", "if false then", walk=5),
    Mutant("accept", "requests + 1 > max_requests", "requests > max_requests", walk=2),
    Mutant("accept", "mine[1] + 1 > mine[3]", "false", walk=62),
    Mutant("accept", "    charge(class, tenant, tokens, weight)\n", ""),
    Mutant("accept", "enqueue(id, 'resume', tokens)", "enqueue(id, class, tokens)", walk=13),
    Mutant("accept", "call('ZADD', prefix .. 'deadlines', now + deadline, id)", "", walk=2),
    Mutant("accept", "call('ZADD', prefix .. 'gateways', now + lease, gateway)", ""),
    Mutant("append", "or state[2] ~= epoch or state[3] ~= nonce", "", walk=1),
    Mutant("append", "state[3] ~= nonce", "false", walk=6),
    Mutant("append", "if known < 0 then", "if false then", walk=2),
    Mutant("append", "if known > 0 and not repeats() then", "if false then", walk=2),
    Mutant("append", "known == count and repeats() and OK or ENDED", "OK or ENDED"),
    Mutant("append", "retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)", "", walk=2),
    Mutant("append", "  call('HINCRBY', req, 'others', 1)\n", "", walk=2),
    Mutant("claim", "call('HINCRBY', req, 'epoch', 1)", "tonumber(call('HGET', req, 'epoch'))"),
    Mutant("claim", "  call('XDEL', queue, best.entry)\n", ""),
    Mutant("claim", "  uncount(best.id, best.queue.name, best.tokens)\n", ""),
    Mutant("claim", "call('SADD', prefix .. 'owned:' .. engine, id)", ""),
    Mutant("claim", "call('ZADD', prefix .. 'leases', now + lease, engine)", "", walk=1),
    Mutant("claim", "'step', '', 'alone'", "'alone'"),
    Mutant("claim", "'from', found[3], ", ""),
    Mutant("claim", "local alone = idle and", "local alone =", walk=30),
    Mutant("claim", "control_is_over(now, control) and claim_suspect()", "claim_suspect()", walk=50),
    Mutant(
        "claim",
        "is_foreign = print ~= '' and fingerprint ~= '' and print ~= fingerprint\n",
        "is_foreign = false\n",
        walk=1,
    ),
    Mutant("claim", "print == '' or fingerprint == '' or print == fingerprint, age", "true, age", walk=50),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint or", "if", walk=7),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint or", "if retired and tonumber(name) or", walk=17),
    Mutant(
        "claim",
        "if retired and name ~= 'resume:' .. fingerprint or",
        "if retired and not tonumber(name) or",
        walk=7,
    ),
    Mutant("claim", "class and arrival + class * ageing", "class and arrival - class * ageing", walk=7),
    Mutant("claim", "or arrival - BEGUN", "or arrival", walk=20),
    Mutant("claim", "best.key > bound or", "", walk=1),
    Mutant("claim", "or one.key < other.key or", "or one.key > other.key or", walk=7),
    Mutant("end", "if not due or tonumber(due) > now_ms() then", "if not due then", walk=1),
    Mutant("end", "if state == 'finished' then", "if false then", walk=2),
    Mutant("end", "if call('XDEL', queue, found[6]) == 1 then", "if false then", walk=2),
    Mutant("end", "uncount(id, found[5], found[7])", "", walk=2),
    Mutant("end", "call('HSETNX', req, 'f' .. choice, reason) == 1", "true", walk=2),
    Mutant("end", "tenant ~= '' and tenant ~= found[2]", "false", walk=5),
    Mutant("end", "call('ZREM', prefix .. 'verdicts', id)", ""),
    Mutant("expire", "\n        requeue_after_death(id, engine, now, control)", "\n      requeue(id, engine)"),
    Mutant("expire", "    note_death(engine, now)\n", ""),
    Mutant("expire", "if engine == ARGV[1] or", "if true or", walk=3),
    Mutant("gateway_heartbeat", "call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])", ""),
    Mutant("gateway_heartbeat", "call('SCARD', prefix .. 'reads:' .. ARGV[1])", "0"),
    Mutant("hand_back", "and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2])", "", walk=13),
    Mutant("hand_back", "and found[2] == engine", "", walk=13),
    Mutant("hand_back", "    if died then", "    if true then", walk=6),
    Mutant("heartbeat", "call('ZADD', prefix .. 'leases', now + lease, engine)", ""),
    Mutant("heartbeat", "    take_back(id)\n", "", walk=1),
    Mutant("heartbeat", "or chosen and chosen ~= engine then", "then", walk=15),
    Mutant("heartbeat", "call('ZREM', prefix .. 'deaths', engine)", ""),
    Mutant("heartbeat", "tonumber(ARGV[8] or 0), tonumber(ARGV[7]), tonumber(ARGV[9]), now)", "0, 0, 0, now)", walk=50),
    Mutant("heartbeat", "local waits = call('ZREM', prefix .. 'suspects', id) +", "local waits =", walk=4),
    Mutant("leave", "if call('EXISTS', prefix .. 'owned:' .. ARGV[1]) == 0 then", "do", walk=29),
    Mutant("leave", "drop_lease(ARGV[1], now_ms())", "", walk=1),
    Mutant("mark", "found[1] == 'running' and found[2] == ARGV[i + 1] and found[3] == ARGV[i + 2]", "found[1]", walk=3),
    Mutant("mark", "call('HSET', req, 'step', ARGV[i + 3])", ""),
    Mutant("poll", "found[2] == 'finished'", "false"),
    Mutant("register", "if not finished then", "if true then", walk=16),
    Mutant("register", "  although_full()\n  add_reader", "  add_reader", walk=8),
    Mutant("register", "or found[1] ~= ARGV[2]", "", walk=5),
    Mutant("register", "call('ZADD', prefix .. 'gateways', now + ARGV[4], gateway)", "", walk=7),
    Mutant("register", "add_reader(id, found[3], gateway)", "", walk=1),
    Mutant("registry", "call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])", ""),
    Mutant("registry", "'(' .. now, '+inf'", "'-inf', now"),
    Mutant("revive", "if found[2] then", "if false then"),
    Mutant("revive", "if not found[1] then", "if false then", walk=3),
    Mutant("revive", "'others', index - tokens", "'others', 0", walk=50),
    Mutant("revive", "call('ZADD', prefix .. 'suspects', now, new)", ""),
    Mutant("sweep", "postpone('leases', lease)", ""),
    Mutant(
        "sweep",
        "postpone('gateways', gateway_lease)\n  restart_graces(0)",
        "postpone('gateways', gateway_lease)",
        walk=10,
    ),
    Mutant("sweep", "or last[2] ~= run.id", "", walk=24),
    Mutant("sweep", "if call('XLEN', prefix .. 'queue:resume:' .. print) > 0 then", "if false then", walk=8),
    Mutant("forget", "add_queue('resume:' .. print)", "", walk=1),
    Mutant("sweep", "'deserted', 0", "'desert', 0"),
    Mutant("sweep", "elseif full then", "elseif false then", walk=8),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", "restart_graces(0)", walk=18),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", ""),
    Mutant("sweep", "    if not restarted then\n", "    if true then\n", walk=198),
    Mutant("sweep", "    note_death(engine, now)\n", ""),
    Mutant("sweep", "call('SADD', lapsed, id)", "", walk=1),
    Mutant("sweep", "\n    remove_reader(id, gateway, now)", ""),
    Mutant("sweep", "'silent', now + silence)", "'silent', now)"),
    Mutant("sweep", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now"),
    Mutant("unregister", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now", walk=319),
    Mutant("sweep", "storms(found[1] .. (found[3] or ''), found[2], now, window)", "false", walk=30),
    Mutant("sweep", "if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then", "if false then", walk=1),
    Mutant("unregister", "remove_reader(ARGV[i], ARGV[1], now)", "", walk=1),
    Mutant("view", "found[10] ~= ARGV[2]", "false", walk=5),
    # Of the prelude, as it stands before one of the scripts that use it.
    Mutant("append", "call('SREM', prefix .. 'owned:' .. engine, id)", "", walk=2),
    Mutant("end", "call('PEXPIRE', prefix .. 'log:' .. id, length)", ""),
    Mutant("end", "  call('ZREM', prefix .. 'deadlines', id)\n", "", walk=2),
    Mutant("expire", "if words(alone) >= CONDEMNED then", "if words(alone) > CONDEMNED then"),
    Mutant("expire", "words(found[6]) >= SUSPECT", "words(found[6]) > SUSPECT"),
    Mutant("expire", "local same = found[1] == found[5]", "local same = true", walk=13),
    Mutant("hand_back", "'nonce', '')\n  if found[5]", "'reason', '')\n  if found[5]"),
    Mutant("hand_back", "resume_queue(began and found[4] or '')", "resume_queue('')", walk=6),
    Mutant("register", "gateway, id)\n  call('ZREM', prefix .. 'graces', id)\n", "gateway, id)\n", walk=1),
    Mutant("sweep", "found[3] ~= '1' and (found[3] == '0' or", "found[3] ~= '1' and (false or", walk=6),
]
