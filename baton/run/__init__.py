"""From a recipe to a running system: loop, parts, evaluation, resume, dry run, supervised warm start."""
