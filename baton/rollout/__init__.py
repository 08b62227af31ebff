"""Rollouts: the scheduler, the controller, and the engines that generate trajectories."""
