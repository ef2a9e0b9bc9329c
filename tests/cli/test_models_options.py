"""The options of `pagestream models`, which stand before or after the action."""

from itertools import product

import pytest
from pagestream_cli.__main__ import build_parser

OPTIONS = (("--redis", "redis://other:1"), ("--data-dir", "/other"), ("--json",))


@pytest.mark.parametrize(("option", "action"), list(product(OPTIONS, ((), ("list",), ("rm", "name")))))
def test_an_option_holds_before_and_after_the_action(option: tuple[str, ...], action: tuple[str, ...]) -> None:
    parser = build_parser()
    orders = [("models", *option, *action)]
    if action[:1] != ("rm",) or option != ("--json",):
        orders.append(("models", *action, *option))
    for order in orders:
        name = option[0].removeprefix("--").replace("-", "_")
        assert getattr(parser.parse_args(order), name) == (option[1] if option[1:] else True), order


@pytest.mark.parametrize("verb", [("dead", "list"), ("keys", "list")])
def test_an_option_that_only_actions_have_is_refused_before_them(verb: tuple[str, str]) -> None:
    command, action = verb
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--data-dir", "/other", action])
