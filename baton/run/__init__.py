"""Constructs and runs what a recipe describes: training, evaluation, resume, dry run, hub, supervised warm start."""
