"""The algorithms, one a file: from the statistics of inputs to the scales and values of weights."""
