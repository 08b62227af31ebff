"""Measurements that a user can make of his own machine, recipe and model."""
