"""A group's preparations are done when each rank has replied, and fail with one of them."""

from __future__ import annotations

from pagestream_engine.errors import RequestFault
from pagestream_engine.executor.preparations import PreparedByAll
from pagestream_engine.request.adapter import LoadedAdapter
from pagestream_engine.request.grammars import Grammar, PreparedGrammar

READ, UNREAD = LoadedAdapter("a", None), LoadedAdapter("a", "gone")


def test_an_adapter_is_there_once_all_ranks_have_read_it() -> None:
    group = PreparedByAll(2)
    group.note(0, [READ, READ])
    assert group.take() == [], "the other rank has neither"
    group.note(1, [READ])
    assert group.take() == [READ]
    assert group.take() == []
    group.note(1, [READ])
    assert group.take() == [READ]


def test_an_adapter_that_one_rank_cannot_read_has_failed() -> None:
    group = PreparedByAll(2)
    group.note(0, [READ])
    group.note(1, [UNREAD])
    assert group.take() == [UNREAD]


def test_a_grammar_that_each_rank_refuses_in_its_own_words_is_replied_to() -> None:
    group = PreparedByAll(2)
    replies = [PreparedGrammar(Grammar("regex", "["), RequestFault(f"rank {rank}")) for rank in range(2)]
    for rank, reply in enumerate(replies):
        group.note(rank, [reply])
    assert group.take() == replies[:1]
