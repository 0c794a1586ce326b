"""Views of a mirror: their definition, parsed from SQL, and which rows of them a change affects."""
