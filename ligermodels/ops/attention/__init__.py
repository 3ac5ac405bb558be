"""Attention backends for training and prefill."""
