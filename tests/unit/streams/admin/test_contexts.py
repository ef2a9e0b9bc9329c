import pytest
from pagestream_streams.admin.contexts import bounds


@pytest.mark.parametrize(
    ("contexts", "said"), [([7], (7, 0)), ([8, 8], (8, 0)), ([8, 4, 6], (8, 4)), ([8, 3, 6], (8, 6)), ([0], (0, 0))]
)
def test_longest_and_default(contexts: list[int], said: tuple[int, int]) -> None:
    assert bounds(contexts) == said
