"""Workers as the gateway sees them: one contract, three implementations, one registry."""
