"""Recorded requests through the real cache, without a model: what other sizes would have found."""
