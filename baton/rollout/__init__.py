"""Growing trajectories: what is asked of an engine, and the runner that asks it."""
