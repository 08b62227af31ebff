"""Weight transfer: a policy version is published as chunks and a manifest, which other machines fetch and verify before
use."""
