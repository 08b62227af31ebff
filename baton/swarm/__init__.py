"""The swarm: workers that generate trajectories in separate processes, on any machine, and the hub to which they
connect over a network."""
