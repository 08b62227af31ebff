"""The settings that users give: sections of a recipe, keys, overrides and presets."""
