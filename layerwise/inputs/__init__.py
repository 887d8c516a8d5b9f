"""What layers are called with: recorded once from the parent, replayed batch by batch."""
