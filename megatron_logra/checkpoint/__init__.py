"""Checkpoints: Megatron's `torch_dist` format, training state on any layout, conversion to and from Hugging Face."""
