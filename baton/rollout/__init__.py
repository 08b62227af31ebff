"""Rollouts: the scheduler and controller that generate trajectories, and the engines that sample them."""
