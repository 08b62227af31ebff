"""A running system made from a recipe: assembly, loop, evaluation, resume, dry run, hub, supervised warm start."""
