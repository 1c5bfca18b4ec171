"""Tasks whose boundaries nobody tells."""
