"""Multi-head models (Medusa): heads, losses, candidate trees, decoding, checkpoint formats, measures."""
