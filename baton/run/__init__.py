"""From a recipe to a running system: assembly, loop, evaluation, resume, dry run, hub, supervised warm start."""
