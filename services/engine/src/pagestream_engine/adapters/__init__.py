"""LoRA adapters: their files, the weights of those in use, and what they add to a linear's product."""
