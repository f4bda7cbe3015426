"""Where plain data come from: YAML files, what they include, overrides and interpolation."""
