"""Decoder and CausalLM, their inputs and outputs, state dicts and export. Nothing here knows a family."""
