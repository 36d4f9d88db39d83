"""How SparseLoCo uses its inner optimizer."""
