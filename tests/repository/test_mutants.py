"""Mutants: what is changed, that it is another program, and how it is drawn and found again."""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from campaigns.mutants import lines_of_callers
from campaigns.mutation.operators import Mutant, draw, is_another_program, mutants_of

SOURCE = b'''\
LIMIT = 3

class Queue:
    def take(self, count: int = 5) -> list[int]:
        """Return at most `count` numbers."""
        logger.info("%d are taken", count)
        if not self.rows or count < 1:
            raise ValueError(f"count: given {count + 1}")
        self.taken += 1
        self.release(min(count, 2))
        return self.rows[:count]

def free(self) -> bool:  # \xc3\xa9
    self.is_free = True
'''
LUA = b"""\
-- takes 5 of 7
local function take(key, count)
  if count >= 1 and key ~= 'a < 3' then
    redis.call('DEL', key)
  end
  return -1
end
return take(KEYS[1], 2 - 1)
"""


def changes(mutants: list[Mutant], function: str) -> set[tuple[str, str, str]]:
    return {(each.operator, each.before, each.edit.text) for each in mutants if each.function == function}


def test_each_operator_changes_what_a_test_can_notice() -> None:
    mutants = mutants_of("cache", "queue.py", SOURCE)
    assert changes(mutants, "Queue.take") == {
        ("negated condition", "not self.rows or count < 1", "(not (not self.rows or count < 1))"),
        ("and/or", "not self.rows or count < 1", "(not self.rows and count < 1)"),
        ("removed not", "not self.rows", "(self.rows)"),
        ("flipped comparison", "count < 1", "(count <= 1)"),
        ("flipped comparison", "count < 1", "(count >= 1)"),
        ("constant", "1", "2"),
        ("removed raise", 'raise ValueError(f"count: given {count + 1}")', "pass"),
        ("removed statement", "self.taken += 1", "pass"),
        ("removed call", "self.release(min(count, 2))", "pass"),
        ("min/max", "min", "max"),
        ("constant", "2", "3"),
        ("changed return", "self.rows[:count]", "None"),
    }
    assert changes(mutants, "free") == {
        ("removed statement", "self.is_free = True", "pass"),
        ("constant", "True", "False"),
    }
    for mutant in mutants:
        assert is_another_program("queue.py", SOURCE, mutant.applied(SOURCE)), mutant
    assert not is_another_program("queue.py", SOURCE, SOURCE.replace(b"  # \xc3\xa9", b""))
    assert not is_another_program("queue.py", SOURCE, SOURCE + b"(")


def test_lua_is_changed_by_its_tokens() -> None:
    mutants = mutants_of("scripts", "take.lua", LUA)
    assert changes(mutants, "take") == {
        (">= flipped", ">=", ">"),
        (">= flipped", ">=", "<"),
        ("and flipped", "and", "or"),
        ("~= flipped", "~=", "=="),
        ("constant", "1", "2"),
        ("removed call", "redis.call('DEL', key)", "do end"),
    }
    assert changes(mutants, "<script>") == {("constant", "1", "2"), ("constant", "2", "3"), ("- flipped", "-", "+")}


def test_a_drawing_depends_on_its_seed_and_not_on_where_a_file_is() -> None:
    moved = b"import os\n\n" + SOURCE.replace(b"at most", b"not more than").replace(b"class Queue:", b"class Queue:\n")
    drawings = {
        seed: [
            {each.key for each in draw(mutants_of("cache", file, source), {file: source}, 2, seed)}
            for file, source in (("queue.py", SOURCE), ("kv_cache/queues.py", moved))
        ]
        for seed in range(8)
    }
    assert all(before == after for before, after in drawings.values())
    assert len({frozenset(before) for before, _ in drawings.values()}) > 1
    [one, other] = draw(mutants_of("cache", "queue.py", SOURCE), {"queue.py": SOURCE}, 5, 1)
    assert {one.function, other.function} == {"Queue.take", "free"}
    assert ast.parse(one.applied(SOURCE))


def test_a_script_is_covered_where_its_constant_is_used(tmp_path: Path) -> None:
    scripts, uses = tmp_path / "scripts.py", tmp_path / "accept.py"
    scripts.write_text('ACCEPT = _load("accept")\nTAKE = _load("batches/take", repeat=False)\n')
    uses.write_text("def accept():\n    run(\n        scripts.TAKE,\n        ACCEPT)\n")
    lua = [tmp_path / "lua" / f"{name}.lua" for name in ("accept", "batches/take", "prelude")]
    for script, lines in zip(lua, ({4}, {3}, {3, 4}), strict=True):
        assert lines_of_callers(script, tmp_path, [scripts, uses], lua)["accept.py"] == lines
