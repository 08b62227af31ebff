"""The planner: which GPUs train, which generate, and in which parallel shape. docs/planner.md explains it.

cluster → pools → problem → (exact | paper) → assignment → Plan
"""
