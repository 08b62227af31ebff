"""Checks that workers' reports agree with the policy and the keyed noise, and quarantines workers whose reports do
not."""
