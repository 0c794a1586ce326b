"""The captured tables: their rules, their definitions in the catalog, and the publication that offers them."""
