"""Cross entropy, from logits or from hidden states."""
