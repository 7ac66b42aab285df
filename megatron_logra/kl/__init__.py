"""Predicted and exact KL divergence of an update, and the step-size controller built on them."""
