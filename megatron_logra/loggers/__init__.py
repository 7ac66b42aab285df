"""Where the metrics of a run go: a table for a person, `metrics.jsonl`, TensorBoard and Weights & Biases."""
