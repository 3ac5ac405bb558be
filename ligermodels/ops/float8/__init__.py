"""Float8: casts with tensor-wise scales, producers that write float8, and matrix products of it."""
