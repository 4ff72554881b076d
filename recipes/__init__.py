"""How what ships with the package is made."""
