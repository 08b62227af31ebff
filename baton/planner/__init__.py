"""The planner decides which GPUs train, which GPUs generate, and in which parallel shape. See docs/planner.md.

cluster → pools → problem → (exact | paper) → assignment → Plan
"""
