"""Tenants: who a key stands for, what it may ask for, and how much of it."""
