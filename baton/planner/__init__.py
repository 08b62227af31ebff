"""The planner: which GPUs train, which generate, in what shape. Facts in docs/planner.md.

cluster → pools → problem → (exact | paper) → assignment → Plan
"""
