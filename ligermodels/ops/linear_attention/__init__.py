"""Token mixers with a cost linear in the number of tokens: the gated delta rule, and the convolution before it."""
