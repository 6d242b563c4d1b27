"""Attention over paged KV: the seam, its metadata, and the backends behind it."""
