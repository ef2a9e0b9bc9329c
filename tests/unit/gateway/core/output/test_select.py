"""What is read out of chat templates."""

import pytest
from pagestream_gateway.core.output.select import reasoning_arguments


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", {"enable_thinking": True}, {"enable_thinking": False}),
        ("{{ messages }}<think>", {}, None),
        ("{{ messages }}", None, {}),
    ],
)
def test_reasoning_is_asked_for_where_the_template_can(
    template: str, on: dict[str, bool] | None, off: dict[str, bool] | None
) -> None:
    assert reasoning_arguments(template, reasons=True) == on
    assert reasoning_arguments(template, reasons=False) == off
