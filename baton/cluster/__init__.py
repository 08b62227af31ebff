"""Carry out a plan on a cluster: what is placed where, and its supervision."""
