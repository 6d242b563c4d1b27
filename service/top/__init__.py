"""`headstart top`: the dashboard's essentials in a terminal."""
