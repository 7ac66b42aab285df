"""Tests of megatron_logra: `unit/` mirrors the package, `distributed/` runs gloo ranks, `gpu/` needs CUDA."""
