"""Data, rewards, advantages, losses and micro-batches of the reinforcement-learning loop (torch only)."""
