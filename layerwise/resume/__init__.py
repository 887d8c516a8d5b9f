"""What a run is, and its state on disk, to go on with on any number of ranks."""
