"""The swarm: workers that generate trajectories in separate processes on any machine, and the hub they connect to."""
