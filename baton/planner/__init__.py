"""The planner decides which GPUs train, which GPUs generate, and in which parallel shape. See docs/planner.md.
Phase 1 finds training shapes and replicas for given GPUs; phase 2 divides the GPUs between trainer and rollout.

cluster → pools → problem → (exact | paper) → assignment → Plan
"""
