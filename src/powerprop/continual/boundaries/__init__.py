"""Where one task ends and the next begins, when nobody tells."""
