"""Numeric descriptions that the planner reads and writes: clusters, models, workloads and plans."""
