"""Which part of a gradient is sent, and what is kept of the rest."""
