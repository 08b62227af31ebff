"""Inference workers that run apart from the trainer and connect over a network."""
