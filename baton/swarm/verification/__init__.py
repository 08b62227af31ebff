"""Whether workers' reports are those that the policy and the keyed noise decide: checks, policy, quarantine."""
