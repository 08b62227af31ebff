"""The trainer on several ranks: shards, balance, rank processes and their messages."""
