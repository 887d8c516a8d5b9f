"""Checkpoints that each torch from 2.11 on wrote, the tests that read them, and the runs of all tests by version."""
