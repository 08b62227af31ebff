"""What users set: a recipe's sections, its keys, overrides and presets."""
