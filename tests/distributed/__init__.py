"""Tests that run several ranks on one machine, and the harness that forks them."""
