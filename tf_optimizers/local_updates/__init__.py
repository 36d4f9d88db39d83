"""Takes the local steps of SparseLoCo, and keeps their weights."""
