"""Checks that workers' reports agree with the policy and the keyed noise: report checks, policy, quarantine."""
