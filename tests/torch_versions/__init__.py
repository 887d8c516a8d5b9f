"""Checkpoints that each torch from 2.11 on wrote, kept as archives, and the tests that read them."""
