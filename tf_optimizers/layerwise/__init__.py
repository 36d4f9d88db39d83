"""Steps Lamb and LANS."""
