"""What is known beyond one process: workers, where prefixes are, and sessions."""
