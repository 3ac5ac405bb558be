"""Routing of tokens to experts, and the grouped matrix products."""
