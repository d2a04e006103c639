"""Which layers go where."""
