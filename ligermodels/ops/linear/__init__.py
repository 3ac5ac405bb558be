"""Linear layers with more than one product."""
