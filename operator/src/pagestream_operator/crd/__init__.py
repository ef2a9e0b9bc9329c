"""The CustomResourceDefinition of EnginePool, generated from the models of `pagestream_operator.api`."""

from pagestream_operator.crd.definition import SchemaError, definition, definition_text, structural_schema

__all__ = ["SchemaError", "definition", "definition_text", "structural_schema"]
