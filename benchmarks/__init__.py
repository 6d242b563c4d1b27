"""Benchmarks: each prints a table and writes benchmarks/results/NAME.json."""
