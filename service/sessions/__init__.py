"""Sessions: the token-exact history of a conversation, and what becomes of its blocks."""
