"""What every optimizer does with a gradient before its own mathematics."""
