"""Creates the state of `Lamb` and `LANS`, and runs their steps."""
