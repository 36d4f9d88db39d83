"""Random programs that must compute on several workers what one does."""
