"""Chat templates: rendered in a sandbox, and the shapes of messages that they take."""

from jinja2 import TemplateError

from pagestream_grammars.templates.probing import EFFORTS, probe, shapes_of
from pagestream_grammars.templates.rendering import Template
from pagestream_grammars.templates.shapes import ChatShapes, SystemPlace, TextBesideCalls, shaped, text_of

__all__ = [
    "EFFORTS",
    "ChatShapes",
    "SystemPlace",
    "Template",
    "TemplateError",
    "TextBesideCalls",
    "probe",
    "shaped",
    "shapes_of",
    "text_of",
]
