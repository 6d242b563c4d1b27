"""`headstart plan`: what of a model fits into given memory, and the floors of its speed."""
