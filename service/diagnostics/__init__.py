"""What became of the latest requests, and why they did not find more in the cache."""
