"""Hugging Face side: model shapes, one bidirectional table per family, safetensors in and out."""
