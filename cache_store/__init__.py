"""The prefix cache: block hashes, the radix tree, the block pool, and their contracts."""
