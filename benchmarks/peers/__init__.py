"""Other programs that read the same data; their results are checked like those of the pipelines."""
