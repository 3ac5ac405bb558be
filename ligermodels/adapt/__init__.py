"""Changes of a model in place: LoRA and adapters in PEFT's format, float8 training, quantised weights."""
