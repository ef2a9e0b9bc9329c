"""Chat templates: rendered in a sandbox, and the shapes of messages that they take."""

from pagestream_grammars.templates.probing import EFFORTS, probe, shapes_of
from pagestream_grammars.templates.rendering import (
    ChatShapes,
    SystemPlace,
    Template,
    TextBesideCalls,
    results_of_calls,
    shaped,
    template_fault,
    text_of,
)

__all__ = [
    "EFFORTS",
    "ChatShapes",
    "SystemPlace",
    "Template",
    "TextBesideCalls",
    "probe",
    "results_of_calls",
    "shaped",
    "shapes_of",
    "template_fault",
    "text_of",
]
