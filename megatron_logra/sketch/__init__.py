"""Random projections and the gradient sketches taken with them."""
