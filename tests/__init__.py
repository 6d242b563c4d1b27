"""A package, so that ``tests.x`` is one module however pytest is called, and none of them hides a
library of the same name (this folder would otherwise come first on the import path)."""
