"""Checkpoints whose linears are quantised: compressed-tensors, fp8, AWQ and GPTQ."""
