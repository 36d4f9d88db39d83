"""What DGC saves on two workers, and what it costs."""
