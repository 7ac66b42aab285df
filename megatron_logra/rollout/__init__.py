"""Engines that sample responses from the current policy."""
