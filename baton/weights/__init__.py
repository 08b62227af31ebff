"""Policy versions that other machines can trust: published as chunks and a manifest, fetched, verified, then used."""
