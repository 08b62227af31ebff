"""Quarantines workers whose reports disagree with the policy or with the noise that the hub assigned."""
