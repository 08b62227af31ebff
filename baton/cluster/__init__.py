"""Execute a plan on a Ray cluster: placement of processes, their supervision, replanning."""
