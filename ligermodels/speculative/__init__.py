"""Models with draft heads (Medusa, MTP): heads, losses, candidate trees, decoding, file formats, scores of heads."""
