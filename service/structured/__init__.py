"""Answers that must match something: what is looked at before a worker is asked for one."""
