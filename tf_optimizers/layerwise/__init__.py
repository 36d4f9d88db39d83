"""What Lamb and LANS share."""
