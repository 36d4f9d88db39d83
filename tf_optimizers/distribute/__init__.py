"""How gradients travel between workers."""
