"""Float8: casts with a scale for each tensor or each row, producers that write float8, and matrix products of it."""
