"""Checks that workers' reports agree with the policy and with the noise that the hub assigned. Quarantines workers
whose reports disagree."""
