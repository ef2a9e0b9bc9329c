"""Chat templates: rendered in a sandbox, and the shapes of messages that they take."""

from pagestream_grammars.templates.probing import EFFORTS, probe, shapes_of
from pagestream_grammars.templates.rendering import Template, template_fault
from pagestream_grammars.templates.shapes import (
    ChatShapes,
    SystemPlace,
    TextBesideCalls,
    results_of_calls,
    shaped,
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
