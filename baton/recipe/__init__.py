"""The settings of a run: recipes, their sections and keys, overrides and presets."""
