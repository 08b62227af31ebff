"""Measurements on this machine: `baton profile` measures for the cost model, `baton bench` compares rollout modes."""
