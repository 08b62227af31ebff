"""Multi-turn tasks: environments, the processes that run them, and those that ship."""
