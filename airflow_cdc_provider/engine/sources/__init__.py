"""Where row changes come from: a folder for each kind of source."""
