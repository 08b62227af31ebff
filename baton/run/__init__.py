"""From a recipe to a running system: loop, assembly, evaluation, resume, dry run, hub, supervised warm start."""
