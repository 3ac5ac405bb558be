"""Token mixers whose cost is linear in the tokens: the gated delta rule, and the short convolution before it."""
