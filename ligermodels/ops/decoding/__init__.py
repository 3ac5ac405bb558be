"""Ops of a decoding step: attention over a cache, trees of candidates, token choice."""
