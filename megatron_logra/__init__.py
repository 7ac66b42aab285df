"""LoGRA (low-rank sketched gradients) reinforcement learning on Megatron-Core."""
