"""Policy versions that other machines can verify: published as chunks and a manifest, fetched, checked, then used."""
