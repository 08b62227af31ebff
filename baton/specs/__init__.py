"""What the planner speaks of: clusters, models, workloads and plans, in numbers."""
