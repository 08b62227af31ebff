"""What the tests on real processes share: a random model, and a run of it that nothing happens to."""

from tests.swarm.swarm_processes import model, unbroken

__all__ = ["model", "unbroken"]
