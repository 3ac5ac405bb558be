"""Models on several GPUs, on torch's own DTensor."""
