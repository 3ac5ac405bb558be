"""Weights quantised to 8 or 4 bits, and the linear layer that dequantises them as it computes."""
