"""`headstart simulate`: what a cache of another size would have found of recorded requests."""
