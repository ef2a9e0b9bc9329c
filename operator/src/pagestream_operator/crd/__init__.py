"""The CustomResourceDefinition of EnginePool, generated from the models of `pagestream_operator.api`."""

from pagestream_operator.crd.definition import definition, definition_text
from pagestream_operator.crd.schema import SchemaError, structural_schema

__all__ = ["SchemaError", "definition", "definition_text", "structural_schema"]
