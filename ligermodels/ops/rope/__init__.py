"""Rotary position embedding, with the q/k-norm and cache write around it."""
