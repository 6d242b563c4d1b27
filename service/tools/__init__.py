"""Tools: how a model is told of them, how it calls them, and how its calls are read."""
