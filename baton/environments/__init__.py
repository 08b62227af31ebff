"""Multi-turn tasks: environments, the processes that run them, and the environments that ship with Baton."""
