"""From a response to a reward: scorers, answer formats, user functions in killable processes, rewards over HTTP."""
