"""The configuration: schema, YAML loading, strict conversion, translation of the field's keys, and the report of every error."""
