"""A plan made real: what is placed where on a cluster, and looked after."""
