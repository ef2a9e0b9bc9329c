"""LoRA adapters: files in PEFT's format, matrices in host memory and in slots, and what rows add to a linear."""
