"""Clusters, models, workloads and plans as data: the input and output of the planner."""
