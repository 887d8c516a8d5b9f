"""How large errors are, measured and shown."""
