"""Where rows go: the contract of a sink, and a folder for each kind."""
