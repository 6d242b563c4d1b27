"""How each endpoint writes its answers."""
