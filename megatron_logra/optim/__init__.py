"""From a sketch to an updated weight: row-wise Adam, exact low-rank merge, split master weights."""
